//! Measurements and events of the last minutes.
//!
//! One task polls the state: each second while a page is open, and every ten seconds otherwise, so
//! that a new page has something to show. Events are the differences from one poll to the next, and
//! the scheduler's decisions.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mdev_core::ids::VgpuId;
use serde::Serialize;

use crate::manager::Manager;
use crate::service::Service;
use vgpud_api::{Decided, Parent, SchedulerDecision, Stats, Vgpu, VgpuState, VgpuStats};

/// Limit of stored samples: five minutes with an open page.
const MAX_SAMPLES: usize = 300;

/// Limit of stored events.
const MAX_EVENTS: usize = 200;
/// The same for those of one kind.
const MAX_ALIKE: usize = MAX_EVENTS / 2;

/// Interval of polls while a page is open.
const PAGE_INTERVAL: Duration = Duration::from_secs(1);

/// Interval of polls without a page.
const IDLE_INTERVAL: Duration = Duration::from_secs(10);

/// Time without a request after which a page counts as closed.
const PAGE_TIMEOUT: Duration = Duration::from_secs(15);

/// Shares at one time, in percent of a GPU.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// Sequence number.
    pub n: u64,
    /// Time, in milliseconds since 1970.
    pub at: u64,
    /// Measured share, and requested or entitled share, of each running vGPU.
    pub vgpus: BTreeMap<String, [f64; 2]>,
    /// Busy time of each GPU.
    pub parents: BTreeMap<String, f64>,
}

/// Event.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    /// Sequence number.
    pub n: u64,
    /// Time, in milliseconds since 1970.
    pub at: u64,
    /// `state`, `vm`, `fault`, `warning` or `decision`.
    pub kind: &'static str,
    /// vGPU or GPU that the event concerns.
    pub about: String,
    /// Human-readable text.
    pub text: String,
}

/// State for a page, with samples and events that the page lacks.
#[derive(Clone, Debug, Serialize)]
pub struct Snapshot {
    /// vGPUs, running or defined.
    pub vgpus: Vec<Vgpu>,
    /// Statistics.
    pub stats: Stats,
    /// Physical GPUs.
    pub parents: Vec<Parent>,
    /// Samples that the page lacks.
    pub samples: Vec<Sample>,
    /// Events that the page lacks.
    pub events: Vec<Event>,
}

/// History of samples and events.
#[derive(Debug, Default)]
pub struct History {
    state: Mutex<State>,
    /// Wakes the polling task when a page is opened.
    page_opened: tokio::sync::Notify,
}

#[derive(Debug, Default)]
struct State {
    page_request: Option<Instant>,
    vgpus: Vec<Vgpu>,
    stats: Stats,
    parents: Vec<Parent>,
    samples: VecDeque<Sample>,
    events: VecDeque<Event>,
    number: u64,
    /// Time of the last recorded decision of each parent's scheduler.
    last_decisions: BTreeMap<String, u64>,
    /// False until the first poll, which has nothing to compare with.
    polled: bool,
}

impl History {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the state, with the samples and events after the given numbers.
    pub fn since(&self, sample: u64, event: u64) -> Snapshot {
        let mut state = self.state();
        if state
            .page_request
            .replace(Instant::now())
            .is_none_or(|last| last.elapsed() > PAGE_TIMEOUT)
        {
            self.page_opened.notify_one();
        }
        Snapshot {
            vgpus: state.vgpus.clone(),
            stats: state.stats.clone(),
            parents: state.parents.clone(),
            samples: state.samples.iter().filter(|found| found.n > sample).cloned().collect(),
            events: state.events.iter().filter(|found| found.n > event).cloned().collect(),
        }
    }

    /// Polls the service, until the runtime ends.
    pub async fn record(self: Arc<Self>, service: Service) {
        loop {
            self.poll(&service).await;
            let has_page = self.state().page_request.is_some_and(|at| at.elapsed() < PAGE_TIMEOUT);
            let interval = if has_page { PAGE_INTERVAL } else { IDLE_INTERVAL };
            let _ = tokio::time::timeout(interval, self.page_opened.notified()).await;
        }
    }

    async fn poll(&self, service: &Service) {
        let replies =
            (service.vgpus().await, service.stats().await, service.query(Manager::parents).await);
        let (Ok(vgpus), Ok(stats), Ok(parents)) = replies else { return };
        let mut decisions = Vec::new();
        for parent in &parents {
            let name = parent.name.clone();
            if let Ok(log) = service.call(move |manager| manager.scheduler_log(&name)).await {
                decisions.push((parent.name.clone(), log));
            }
        }
        self.state().update(vgpus, stats, parents, &decisions, now());
    }
}

/// Returns the time, in milliseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl State {
    /// Records a poll: decisions, differences to the previous poll, and a sample.
    fn update(
        &mut self,
        vgpus: Vec<Vgpu>,
        stats: Stats,
        parents: Vec<Parent>,
        decisions: &[(String, Vec<SchedulerDecision>)],
        at: u64,
    ) {
        for (parent, log) in decisions {
            self.add_decisions(parent, log, at);
        }
        if self.polled {
            self.add_differences(&vgpus, &stats, &parents, at);
        }
        self.polled = true;
        self.number += 1;
        let share = |vgpu: &VgpuStats| {
            [vgpu.share_measured, vgpu.share_asked.map_or(vgpu.share_entitled, f64::from)]
        };
        let sample = Sample {
            n: self.number,
            at,
            vgpus: stats.vgpus.iter().map(|vgpu| (vgpu.uuid.to_string(), share(vgpu))).collect(),
            parents: stats.parents.iter().map(|gpu| (gpu.parent.clone(), gpu.busy)).collect(),
        };
        push(&mut self.samples, sample, MAX_SAMPLES);
        (self.vgpus, self.stats, self.parents) = (vgpus, stats, parents);
    }

    fn add_event(&mut self, at: u64, kind: &'static str, about: &str, text: String) {
        self.number += 1;
        let event = Event { n: self.number, at, kind, about: about.to_owned(), text };
        // Those of a kind that comes often, such as decisions, leave room for the others.
        let mut alike = (0..self.events.len()).filter(|index| self.events[*index].kind == kind);
        if let Some(oldest) = alike.next()
            && alike.count() + 1 >= MAX_ALIKE
        {
            self.events.remove(oldest);
        }
        push(&mut self.events, event, MAX_EVENTS);
    }

    fn add_decisions(&mut self, parent: &str, log: &[SchedulerDecision], now: u64) {
        let last = self.last_decisions.get(parent).copied().unwrap_or_default();
        let mut latest = last;
        let mut fresh: Vec<_> =
            log.iter().map(|entry| (now.saturating_sub(entry.age_ms), entry)).collect();
        fresh.sort_by_key(|(at, _)| *at);
        for (at, decision) in fresh {
            // Ages are rounded, so a decision up to 3 ms newer is the same one.
            if at <= last.saturating_add(3) || !is_notable(decision) {
                continue;
            }
            latest = latest.max(at);
            let text = format!("{} ({})", describe(&decision.decision), decision.cause);
            self.add_event(at, "decision", &decision.vgpu.to_string(), text);
        }
        self.last_decisions.insert(parent.to_owned(), latest);
    }

    fn add_differences(&mut self, vgpus: &[Vgpu], stats: &Stats, parents: &[Parent], at: u64) {
        let before: BTreeMap<VgpuId, Vgpu> =
            self.vgpus.iter().map(|vgpu| (vgpu.uuid, vgpu.clone())).collect();
        for vgpu in vgpus {
            let about = vgpu.uuid.to_string();
            let was = before.get(&vgpu.uuid);
            let state = was.map_or(VgpuState::Stopped, |was| was.state);
            if state != vgpu.state {
                let reason = vgpu.reason.as_deref().map(|why| format!(": {why}"));
                let text = format!("{}{}", describe_state(vgpu.state), reason.unwrap_or_default());
                self.add_event(at, "state", &about, text);
            }
            let was_vm = was.and_then(|was| was.vm).map(|vm| vm.pid);
            match (was_vm, vgpu.vm.map(|vm| vm.pid)) {
                (old, Some(pid)) if old != Some(pid) => {
                    self.add_event(at, "vm", &about, format!("VM attached: process {pid}"));
                }
                (Some(pid), None) => {
                    self.add_event(at, "vm", &about, format!("VM detached: process {pid}"));
                }
                _ => {}
            }
            let known = was.map(|was| was.warnings.as_slice()).unwrap_or_default();
            for warning in vgpu.warnings.iter().filter(|warning| !known.contains(warning)) {
                self.add_event(at, "warning", &about, warning.clone());
            }
        }
        for gone in before.values().filter(|was| vgpus.iter().all(|now| now.uuid != was.uuid)) {
            self.add_event(at, "state", &gone.uuid.to_string(), "Removed".to_owned());
        }
        self.add_faults(&stats.vgpus, at);
        let parents_before: BTreeMap<_, _> =
            self.parents.iter().map(|parent| (parent.name.clone(), parent.state)).collect();
        for parent in parents {
            if parents_before.get(&parent.name) != Some(&parent.state) {
                let text = format!("The GPU is {:?}", parent.state).to_lowercase();
                self.add_event(at, "state", &parent.name, text);
            }
        }
    }

    fn add_faults(&mut self, stats: &[VgpuStats], at: u64) {
        let before: BTreeMap<VgpuId, (u64, u64)> = self
            .stats
            .vgpus
            .iter()
            .map(|vgpu| (vgpu.uuid, (vgpu.faults, vgpu.hang_resets)))
            .collect();
        for vgpu in stats {
            let (faults, hangs) = before.get(&vgpu.uuid).copied().unwrap_or_default();
            let about = vgpu.uuid.to_string();
            let hung = vgpu.hang_resets.saturating_sub(hangs);
            let other = vgpu.faults.saturating_sub(faults).saturating_sub(hung);
            if hung > 0 {
                self.add_event(at, "fault", &about, format!("{hung} channels hung and were reset"));
            }
            if other > 0 {
                self.add_event(at, "fault", &about, format!("{other} channel faults"));
            }
        }
    }
}

/// Appends an item, and removes the oldest beyond `limit`.
fn push<T>(items: &mut VecDeque<T>, item: T, limit: usize) {
    if items.len() == limit {
        items.pop_front();
    }
    items.push_back(item);
}

/// Returns whether a decision is worth an event. Decisions that correct averages occur many times
/// per second.
fn is_notable(decision: &SchedulerDecision) -> bool {
    !matches!(decision.cause.as_str(), "repay" | "cap" | "stale")
}

fn describe(decision: &Decided) -> String {
    match decision {
        Decided::Timeslice { timeslice_us } => {
            format!("Time slice {:.1} ms", *timeslice_us as f64 / 1e3)
        }
        Decided::Cap { time_us, period_us } => {
            let (time, period) = (*time_us as f64 / 1e3, *period_us as f64 / 1e3);
            format!("At most {time:.1} ms of every {period:.1} ms")
        }
        Decided::NoCap => "No cap".to_owned(),
        Decided::Gate { open: true } => "Gate opened".to_owned(),
        Decided::Gate { open: false } => "Gate closed".to_owned(),
    }
}

fn describe_state(state: VgpuState) -> &'static str {
    match state {
        VgpuState::Stopped => "Stopped",
        VgpuState::Running => "Started",
        VgpuState::Restarting => "The worker died and is being restarted",
        VgpuState::Failed => "Failed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_leave_room_for_other_events() {
        let mut state = State::default();
        state.add_event(0, "vm", "a", "VM attached: process 7".to_owned());
        for at in 1..1000 {
            state.add_event(at, "decision", "a", "Time slice 2.0 ms (demand)".to_owned());
        }
        let kinds: Vec<_> = state.events.iter().map(|event| event.kind).collect();
        assert_eq!((kinds[0], kinds.len()), ("vm", 1 + MAX_ALIKE));
        assert_eq!(state.events.back().map(|event| event.at), Some(999));
        for at in 1000..2000 {
            state.add_event(at, "vm", "a", "VM detached: process 7".to_owned());
        }
        assert_eq!(state.events.len(), MAX_EVENTS);
    }
}
