//! The order of turns: which context uses the engine, and until when.
//!
//! [`Runlist`] picks the context and the length. A turn is given a little before it begins, so that
//! its context is awake when the turn before it ends.
//!
//! A context may have been taken over, and say anything. It is therefore charged for the time for
//! which others could not use the engine because of it, from the time at which its turn could begin
//! until it has ended, whatever it says of its use. A turn that ends early also costs what it takes
//! to wake the next context. What a context says counts where it is more: the use of a turn that it
//! has overrun. In a turn without an end it alone counts, since no other context waits then.
//!
//! The host may run something else on the CPU of a context, in its turn or when it should begin.
//! That time is given back, by the kernel's count and not by the context's
//! ([`Contexts::delayed_ns`]). Others use the engine while a context does not begin or does not
//! end, and owe it the time, for [`LAG_NS`] at most. A context that sleeps for longer is held by
//! its tenant.
//!
//! Pure: the caller passes the time and the contexts, and calls again at the time that
//! [`Rotation::step`] returns.

#[cfg(test)]
mod tests;

use mdev_core::sched::Budget;

use crate::mediator::emulation::runlist::{Entry, Runlist};
use crate::mediator::turn_page::{ENDLESS, Seen, TurnPage};

/// Time before the end of a turn at which the next one is given: what a thread takes to wake up.
const LEAD_NS: u64 = 60_000;
/// Shortest turn. What exceeds the slice is charged to the next ones.
const SHORTEST_NS: u64 = 200_000;
/// Time in which a context has to begin while others wait.
const BEGIN_LIMIT_NS: u64 = 1_000_000;
/// Time for which a context that the host does not run counts as one that uses the engine.
const LAG_NS: u64 = 20_000_000;
/// Turn of a context that uses the time of one that the host does not run.
const BORROWED_NS: u64 = 500_000;
/// Shortest time until the next look, unless a context rings.
const LOOK_NS: u64 = 50_000;
/// Time that a context can count later than it has passed, at most.
const MAX_UNCOUNTED_NS: u64 = 1_000_000_000;
/// Longest wait for a turn by the budgets' order.
const BUDGET_WAIT_NS: u64 = 800_000;

/// The contexts, by their seats.
pub trait Contexts {
    /// Returns the page of a context.
    fn page(&self, seat: usize) -> &TurnPage;

    /// Returns what a context says.
    fn seen(&self, seat: usize) -> Seen {
        self.page(seat).seen()
    }

    /// Returns for how long the thread of a context's engine has been able to run, and the host has
    /// run something else.
    fn delayed_ns(&self, seat: usize) -> u64;
}

/// What the arbiter counts of a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Time with work and a closed gate, or without a budget.
    pub gated_ns: u64,
    /// Number of times that this began.
    pub gate_closings: u64,
    /// Engine time with a closed gate.
    pub gate_cost_ns: u64,
    /// Turns that ended with work left, and were followed by another context's.
    pub preemptions: u64,
}

/// A context's place in the rotation.
#[derive(Debug, Default)]
struct Seat {
    is_open: bool,
    seen: Seen,
    /// What the context said last of its engine time; `None` before it has said any.
    said_ns: Option<u64>,
    /// Engine time that the context can have used.
    engine_ns: u64,
    /// Time that has passed and that the context has not counted as used.
    uncounted_ns: u64,
    looked_ns: u64,
    /// Time of the turn that is charged and that the context has not counted.
    ahead_ns: u64,
    /// Turn that is over and that the context has not ended yet, and since when.
    leaving: Option<(Given, u64)>,
    gated_since_ns: Option<u64>,
    counts: Counts,
}

impl Seat {
    /// Returns the part of what the context says that it has used since the last look that it can
    /// have used.
    fn used_ns(&self, engine_ns: u64, now_ns: u64) -> u64 {
        let passed_ns = now_ns.saturating_sub(self.looked_ns);
        let said_ns = engine_ns.saturating_sub(self.said_ns.unwrap_or(engine_ns));
        said_ns.min(self.uncounted_ns.saturating_add(passed_ns))
    }

    /// Returns whether the context could use the engine.
    fn is_ready(&self) -> bool {
        self.is_open && self.leaving.is_none() && self.seen.has_work
    }
}

/// A turn that was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Given {
    seat: usize,
    number: u64,
    begin_ns: u64,
    began_ns: Option<u64>,
    length_ns: u64,
    /// Time from which on the turn keeps others from the engine.
    held_from_ns: u64,
    /// What the context had counted at that time.
    counted_before_ns: u64,
    /// What the host had run instead of it at that time.
    delayed_before_ns: u64,
}

impl Given {
    /// Returns the end, if the turn has one.
    fn end_ns(&self) -> Option<u64> {
        let from = self.began_ns.unwrap_or(self.begin_ns);
        (self.length_ns != ENDLESS).then(|| from.saturating_add(self.length_ns))
    }
}

/// Turns of all contexts.
#[derive(Debug, Default)]
pub struct Rotation {
    runlist: Runlist,
    seats: Vec<Seat>,
    current: Option<Given>,
    /// Turn that begins at the end of the current one.
    next: Option<Given>,
    last_number: u64,
    /// Time up to which the last turn that is over is charged.
    held_until_ns: u64,
}

impl Rotation {
    /// Adds a context, and returns its seat: the number of contexts before it.
    pub fn add(&mut self, slice_ns: u64, now_ns: u64) -> usize {
        self.seats.push(Seat { is_open: true, looked_ns: now_ns, ..Seat::default() });
        self.runlist.push(Entry::new(slice_ns))
    }

    /// Removes a context. The seats of later ones decrease by one.
    pub fn remove(&mut self, seat: usize) {
        self.seats.remove(seat);
        self.runlist.remove(seat);
        for turn in [&mut self.current, &mut self.next] {
            *turn = turn.filter(|given| given.seat != seat);
            if let Some(given) = turn.as_mut().filter(|given| given.seat > seat) {
                given.seat -= 1;
            }
        }
    }

    /// Sets the time slice of a context.
    pub fn set_slice(&mut self, seat: usize, slice_ns: u64) {
        self.runlist.entry(seat).slice_ns = slice_ns;
    }

    /// Opens or closes a context's gate.
    pub fn set_gate(&mut self, seat: usize, is_open: bool) {
        self.seats[seat].is_open = is_open;
    }

    /// Sets or removes a context's budget.
    pub fn set_budget(&mut self, seat: usize, budget: Option<Budget>, now_ns: u64) {
        self.runlist.entry(seat).set_budget(budget, now_ns, BUDGET_WAIT_NS);
    }

    /// Returns what is counted of a context, up to now.
    pub fn counts(&self, seat: usize, now_ns: u64) -> Counts {
        let Seat { mut counts, gated_since_ns, .. } = self.seats[seat];
        counts.gated_ns += gated_since_ns.map_or(0, |since| now_ns.saturating_sub(since));
        counts
    }

    /// Returns the engine time of a context that says that it has used `said_ns`.
    pub fn engine_ns(&self, seat: usize, said_ns: u64, now_ns: u64) -> u64 {
        let seat = &self.seats[seat];
        let before_ns = if seat.said_ns.is_some() { seat.engine_ns } else { said_ns.min(now_ns) };
        before_ns.saturating_add(seat.used_ns(said_ns, now_ns))
    }

    /// Looks at the contexts and gives turns. Returns when to look again, unless a context or a
    /// change of the settings causes that before.
    pub fn step(&mut self, now_ns: u64, contexts: &impl Contexts) -> Option<u64> {
        for seat in 0..self.seats.len() {
            self.look(seat, contexts.seen(seat), now_ns);
            self.leave(seat, contexts);
        }
        while self.end_current(now_ns, contexts) {}
        match self.current {
            None => self.begin_next(now_ns, contexts),
            Some(turn) if turn.length_ns == ENDLESS => self.limit(turn, now_ns, contexts),
            Some(turn) => self.prepare_next(turn, now_ns, contexts),
        }
        self.count_gated(now_ns);
        self.next_look_ns(now_ns)
    }

    /// Charges what a context has used since the last look.
    fn look(&mut self, index: usize, seen: Seen, now_ns: u64) {
        let is_alone =
            self.current.is_some_and(|turn| turn.seat == index && turn.length_ns == ENDLESS);
        let seat = &mut self.seats[index];
        seat.seen = seen;
        if let Some(said_ns) = seen.engine_ns {
            let used = seat.used_ns(said_ns, now_ns);
            let passed_ns = now_ns.saturating_sub(seat.looked_ns);
            let uncounted_ns = seat.uncounted_ns.saturating_add(passed_ns).saturating_sub(used);
            seat.uncounted_ns = uncounted_ns.min(MAX_UNCOUNTED_NS);
            seat.looked_ns = now_ns;
            if seat.said_ns.is_none() {
                // A context that continues has counted before. No time is older than the clock.
                seat.engine_ns = said_ns.min(now_ns);
            }
            seat.engine_ns = seat.engine_ns.saturating_add(used);
            seat.said_ns = seat.said_ns.max(Some(said_ns));
            if !seat.is_open {
                seat.counts.gate_cost_ns = seat.counts.gate_cost_ns.saturating_add(used);
            }
            let ahead = used.min(seat.ahead_ns);
            seat.ahead_ns -= ahead;
            if is_alone {
                self.runlist.charge_alone(index, used - ahead);
            } else if used > ahead {
                self.runlist.charge(index, used - ahead);
            }
        }
    }

    /// Notes that a context has ended a turn that the arbiter had ended.
    fn leave(&mut self, index: usize, contexts: &impl Contexts) {
        let Seat { seen, leaving, .. } = &mut self.seats[index];
        // One that lost its work before it began says nothing any more.
        let uses_nothing = !seen.has_work && !seen.is_active;
        if let Some((turn, _)) =
            leaving.take_if(|(turn, _)| seen.ended == turn.number || uses_nothing)
        {
            self.settle(turn, contexts);
        }
    }

    /// Charges what the current turn keeps others from the engine until `end_ns`, and the context
    /// has not counted. Gives back what has been charged for a later end.
    fn charge_held(&mut self, turn: Given, end_ns: u64) {
        let seat = &mut self.seats[turn.seat];
        let held_ns =
            if turn.length_ns == ENDLESS { 0 } else { end_ns.saturating_sub(turn.held_from_ns) };
        let counted_ns = seat.engine_ns.saturating_sub(turn.counted_before_ns);
        let before_ns = std::mem::replace(&mut seat.ahead_ns, held_ns.saturating_sub(counted_ns));
        if seat.ahead_ns >= before_ns {
            self.runlist.charge(turn.seat, seat.ahead_ns - before_ns);
        } else {
            self.runlist.refund(turn.seat, before_ns - seat.ahead_ns);
        }
    }

    /// Gives back the part of a turn that a context has ended in which the host has run something
    /// else.
    fn settle(&mut self, turn: Given, contexts: &impl Contexts) {
        let ahead_ns = std::mem::take(&mut self.seats[turn.seat].ahead_ns);
        let delayed_ns = contexts.delayed_ns(turn.seat).saturating_sub(turn.delayed_before_ns);
        self.runlist.refund(turn.seat, ahead_ns.min(delayed_ns));
    }

    fn others_are_ready(&self, than: usize) -> bool {
        let mut others = self.seats.iter().enumerate().filter(|(index, _)| *index != than);
        others.any(|(_, seat)| seat.is_ready())
    }

    /// Ends the current turn if it is over. Returns true if the next one has begun with that.
    fn end_current(&mut self, now_ns: u64, contexts: &impl Contexts) -> bool {
        let Some(mut turn) = self.current else { return false };
        let seat = &self.seats[turn.seat];
        if seat.seen.began.0 == turn.number && turn.began_ns.is_none() {
            turn.began_ns = Some(seat.seen.began.1.clamp(turn.begin_ns, now_ns.max(turn.begin_ns)));
            self.current = Some(turn);
        }
        let has_ended = seat.seen.ended == turn.number;
        let has_begun = turn.began_ns.is_some();
        let is_late = !has_begun
            && now_ns >= turn.begin_ns.saturating_add(BEGIN_LIMIT_NS)
            && self.others_are_ready(turn.seat);
        let is_over = has_begun
            && if let Some(end_ns) = turn.end_ns() {
                now_ns >= end_ns
            } else {
                !seat.seen.is_active && self.others_are_ready(turn.seat)
            };
        let has_nothing = !has_begun && !seat.seen.has_work;
        let is_revoked = is_late || is_over || has_nothing || !seat.is_open;
        if !has_ended && !is_revoked {
            return false;
        }
        // The next turn has begun meanwhile, if it was given.
        let free_ns = self.next.map_or(now_ns, |next| next.begin_ns);
        // No other context is awake when a turn ends early, or does not begin.
        let wakes = self.next.is_none() && self.others_are_ready(turn.seat);
        let wakes_ns = if wakes { LEAD_NS } else { 0 };
        self.held_until_ns = free_ns.min(now_ns).saturating_add(wakes_ns);
        self.charge_held(turn, self.held_until_ns);
        if has_ended {
            self.settle(turn, contexts);
        } else {
            self.revoke(turn, now_ns, is_late, contexts);
        }
        self.current = self.next.take();
        if let Some(next) = &mut self.current {
            self.seats[turn.seat].counts.preemptions +=
                u64::from(self.seats[turn.seat].seen.has_work);
            if next.begin_ns > now_ns {
                (next.begin_ns, next.held_from_ns) = (now_ns, now_ns);
                contexts.page(next.seat).set_begin(now_ns);
            }
        }
        self.current.is_some()
    }

    /// Ends a turn for the arbiter. The context may be in it still, or be `late` to begin it.
    fn revoke(&mut self, turn: Given, now_ns: u64, late: bool, contexts: &impl Contexts) {
        if contexts.page(turn.seat).revoke(turn.number) || late {
            self.seats[turn.seat].leaving = Some((turn, now_ns));
        } else {
            self.settle(turn, contexts);
        }
    }

    /// Returns the context that the runlist picks, and for how long.
    fn pick(&mut self, now_ns: u64) -> Option<(usize, u64)> {
        let mut lags = false;
        for (index, seat) in self.seats.iter().enumerate() {
            let is_lagging = seat.is_open
                && seat.seen.has_work
                && seat.leaving.is_some_and(|(_, since)| now_ns < since.saturating_add(LAG_NS));
            lags |= is_lagging;
            self.runlist.entry(index).ready = is_lagging || seat.is_ready();
        }
        let (seat, left_ns) = self.runlist.pick(now_ns)?;
        if self.seats[seat].leaving.is_some() {
            let can_run =
                |index: &usize| self.seats[*index].is_ready() && self.runlist.may_run(*index);
            let count = self.seats.len();
            let mut others = (1..count).map(|step| (seat + step) % count);
            return others.find(can_run).map(|other| (other, BORROWED_NS));
        }
        let is_endless =
            !lags && !self.others_are_ready(seat) && !self.runlist.entry(seat).has_budget();
        Some((seat, if is_endless { ENDLESS } else { left_ns.max(SHORTEST_NS) }))
    }

    fn give(
        &mut self,
        seat: usize,
        begin_ns: u64,
        length_ns: u64,
        contexts: &impl Contexts,
    ) -> Given {
        self.last_number += 1;
        let number = self.last_number;
        contexts.page(seat).grant(number, begin_ns, length_ns);
        Given {
            seat,
            number,
            begin_ns,
            began_ns: None,
            length_ns,
            held_from_ns: begin_ns.max(self.held_until_ns),
            counted_before_ns: self.seats[seat].engine_ns,
            delayed_before_ns: contexts.delayed_ns(seat),
        }
    }

    fn begin_next(&mut self, now_ns: u64, contexts: &impl Contexts) {
        if let Some((seat, length_ns)) = self.pick(now_ns) {
            self.current = Some(self.give(seat, now_ns, length_ns, contexts));
        }
    }

    /// Gives a turn without an end one, because another context waits, or for a new budget.
    fn limit(&mut self, mut turn: Given, now_ns: u64, contexts: &impl Contexts) {
        if !self.others_are_ready(turn.seat) && !self.runlist.entry(turn.seat).has_budget() {
            return;
        }
        self.seats[turn.seat].ahead_ns = 0;
        turn.held_from_ns = now_ns;
        turn.counted_before_ns = self.seats[turn.seat].engine_ns;
        turn.delayed_before_ns = contexts.delayed_ns(turn.seat);
        let Some((seat, left_ns)) = self.pick(now_ns) else { return };
        let used_ns = turn.began_ns.map_or(0, |began| now_ns.saturating_sub(began));
        let length_ns;
        if seat == turn.seat {
            length_ns = used_ns.saturating_add(left_ns);
            contexts.page(seat).set_length(length_ns);
        } else {
            // The context works until the other one is awake.
            length_ns = used_ns.saturating_add(LEAD_NS);
            contexts.page(turn.seat).interrupt(length_ns);
        }
        // The context may have begun to rest, and would keep a turn with an end.
        if turn.began_ns.is_some() && !contexts.seen(turn.seat).is_active {
            self.revoke(turn, now_ns, false, contexts);
            self.current = None;
            return self.begin_next(now_ns, contexts);
        }
        self.current = Some(Given { length_ns, ..turn });
        if seat != turn.seat {
            let begin_ns = now_ns.saturating_add(LEAD_NS);
            self.next = Some(self.give(seat, begin_ns, left_ns, contexts));
        }
    }

    /// Picks the context after the current one, shortly before the turn ends.
    fn prepare_next(&mut self, turn: Given, now_ns: u64, contexts: &impl Contexts) {
        let (Some(_), Some(end_ns)) = (turn.began_ns, turn.end_ns()) else { return };
        if self.next.is_some() || now_ns.saturating_add(LEAD_NS) < end_ns {
            return;
        }
        self.charge_held(turn, end_ns);
        match self.pick(now_ns) {
            Some((seat, left_ns)) if seat == turn.seat => {
                let length_ns = turn.length_ns.saturating_add(left_ns);
                self.current = Some(Given { length_ns, ..turn });
                contexts.page(seat).set_length(length_ns);
            }
            Some((seat, left_ns)) => {
                self.next = Some(self.give(seat, end_ns, left_ns, contexts));
            }
            None => {}
        }
    }

    fn count_gated(&mut self, now_ns: u64) {
        for index in 0..self.seats.len() {
            let is_capped = self.runlist.entry(index).capped();
            let seat = &mut self.seats[index];
            let has_turn =
                [self.current, self.next].iter().flatten().any(|turn| turn.seat == index);
            let is_gated = seat.seen.has_work && !has_turn && (!seat.is_open || is_capped);
            match seat.gated_since_ns {
                None if is_gated => {
                    seat.gated_since_ns = Some(now_ns);
                    seat.counts.gate_closings += 1;
                }
                Some(since) if !is_gated => {
                    seat.counts.gated_ns += now_ns.saturating_sub(since);
                    seat.gated_since_ns = None;
                }
                _ => {}
            }
        }
    }

    /// Returns when to look again: in a series of turns once in each, shortly before its end. A
    /// context rings when it has ended a turn that the arbiter had ended.
    fn next_look_ns(&self, now_ns: u64) -> Option<u64> {
        let of_turn = self.next.or(self.current).and_then(|turn| {
            let end_ns = turn.end_ns()?;
            let prepares_ns = end_ns.saturating_sub(LEAD_NS);
            let begins_ns = turn.begin_ns.saturating_add(BEGIN_LIMIT_NS);
            Some(match turn.began_ns {
                None => prepares_ns.min(begins_ns).max(now_ns + LOOK_NS),
                Some(_) if prepares_ns > now_ns => prepares_ns,
                Some(_) => end_ns.max(now_ns + LOOK_NS),
            })
        });
        let opens = self.runlist.next_ns().map(|at| at.max(now_ns + LOOK_NS));
        of_turn.into_iter().chain(opens).min()
    }
}
