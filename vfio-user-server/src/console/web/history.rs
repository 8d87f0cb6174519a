//! What was measured over the last minutes, and what happened.
//!
//! One task asks as the page would: each second while a page looks, and now and then otherwise, so that a page that is
//! opened has something to show. What happened is what differs from one answer to the next, and what the scheduler
//! decided.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mdev_core::ids::VgpuId;
use serde::Serialize;

use crate::api::model::{Decided, Parent, SchedulerDecision, Stats, Vgpu, VgpuState, VgpuStats};
use crate::api::service::Api;
use crate::manager::Manager;

/// Samples that are kept: five minutes of a page that looks.
const SAMPLES: usize = 300;

/// Events that are kept.
const EVENTS: usize = 200;

/// From one look to the next while a page looks, and while none does.
const WATCHED: Duration = Duration::from_secs(1);
const ALONE: Duration = Duration::from_secs(10);

/// A page that has asked for nothing for so long is gone, or in the background.
const GONE: Duration = Duration::from_secs(15);

/// What one look found, in hundredths of a GPU.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// Its number.
    pub n: u64,
    /// Milliseconds since 1970.
    pub at: u64,
    /// Each running vGPU's share: what it got, and what it asked for or is due.
    pub vgpus: BTreeMap<String, [f64; 2]>,
    /// How busy each GPU was.
    pub parents: BTreeMap<String, f64>,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    /// Its number.
    pub n: u64,
    /// Milliseconds since 1970.
    pub at: u64,
    /// `state`, `vm`, `fault`, `warning` or `decision`.
    pub kind: &'static str,
    /// What it is about: a vGPU or a GPU.
    pub about: String,
    /// In words.
    pub text: String,
}

/// What a page is told.
#[derive(Clone, Debug, Serialize)]
pub struct Told {
    /// vGPUs, running or defined.
    pub vgpus: Vec<Vgpu>,
    /// What they were given and used.
    pub stats: Stats,
    /// The GPUs.
    pub parents: Vec<Parent>,
    /// Samples that the page has not seen.
    pub samples: Vec<Sample>,
    /// Events that it has not seen.
    pub events: Vec<Event>,
}

/// All that is kept.
#[derive(Debug, Default)]
pub struct History {
    kept: Mutex<Kept>,
    /// Wakes the task early: a page has come.
    page: tokio::sync::Notify,
}

#[derive(Debug, Default)]
struct Kept {
    looked_at: Option<Instant>,
    vgpus: Vec<Vgpu>,
    stats: Stats,
    parents: Vec<Parent>,
    samples: VecDeque<Sample>,
    events: VecDeque<Event>,
    number: u64,
    decided: BTreeMap<String, u64>,
    /// False until the first look: what is there then has not happened now.
    begun: bool,
}

impl History {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a page that has seen all up to a sample and an event is told.
    pub fn tell(&self, sample: u64, event: u64) -> Told {
        let mut kept = self.kept();
        if kept.looked_at.replace(Instant::now()).is_none_or(|last| last.elapsed() > GONE) {
            self.page.notify_one();
        }
        Told {
            vgpus: kept.vgpus.clone(),
            stats: kept.stats.clone(),
            parents: kept.parents.clone(),
            samples: kept.samples.iter().filter(|one| one.n > sample).cloned().collect(),
            events: kept.events.iter().filter(|one| one.n > event).cloned().collect(),
        }
    }

    /// Looks for as long as the manager answers.
    pub async fn keep(self: Arc<Self>, api: Api) {
        loop {
            self.look(&api).await;
            let watched = self.kept().looked_at.is_some_and(|at| at.elapsed() < GONE);
            let pause = if watched { WATCHED } else { ALONE };
            let _ = tokio::time::timeout(pause, self.page.notified()).await;
        }
    }

    async fn look(&self, api: &Api) {
        let answers = (api.all().await, api.stats().await, api.read(Manager::parents).await);
        let (Ok(vgpus), Ok(stats), Ok(parents)) = answers else { return };
        let mut decisions = Vec::new();
        for parent in &parents {
            let name = parent.name.clone();
            if let Ok(log) = api.ask(move |manager| manager.scheduler_log(&name)).await {
                decisions.push((parent.name.clone(), log));
            }
        }
        self.kept().take(vgpus.0, stats, parents, &decisions, now());
    }
}

/// Milliseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Kept {
    fn take(
        &mut self,
        vgpus: Vec<Vgpu>,
        stats: Stats,
        parents: Vec<Parent>,
        decisions: &[(String, Vec<SchedulerDecision>)],
        at: u64,
    ) {
        for (parent, log) in decisions {
            self.decisions(parent, log, at);
        }
        if self.begun {
            self.differences(&vgpus, &stats, &parents, at);
        }
        self.begun = true;
        self.number += 1;
        let share = |one: &VgpuStats| {
            [one.share_measured, one.share_asked.map_or(one.share_entitled, f64::from)]
        };
        let sample = Sample {
            n: self.number,
            at,
            vgpus: stats.vgpus.iter().map(|one| (one.uuid.to_string(), share(one))).collect(),
            parents: stats.parents.iter().map(|one| (one.parent.clone(), one.busy)).collect(),
        };
        push(&mut self.samples, sample, SAMPLES);
        (self.vgpus, self.stats, self.parents) = (vgpus, stats, parents);
    }

    fn event(&mut self, at: u64, kind: &'static str, about: &str, text: String) {
        self.number += 1;
        let event = Event { n: self.number, at, kind, about: about.to_owned(), text };
        push(&mut self.events, event, EVENTS);
    }

    fn decisions(&mut self, parent: &str, log: &[SchedulerDecision], now: u64) {
        let last = self.decided.get(parent).copied().unwrap_or_default();
        let mut latest = last;
        let mut fresh: Vec<_> =
            log.iter().map(|one| (now.saturating_sub(one.age_ms), one)).collect();
        fresh.sort_by_key(|(at, _)| *at);
        for (at, decision) in fresh {
            // Ages are rounded: what is a few milliseconds newer is the same.
            if at <= last.saturating_add(3) || !for_people(decision) {
                continue;
            }
            latest = latest.max(at);
            let text = format!("{} ({})", words(&decision.decision), decision.cause);
            self.event(at, "decision", &decision.vgpu.to_string(), text);
        }
        self.decided.insert(parent.to_owned(), latest);
    }

    fn differences(&mut self, vgpus: &[Vgpu], stats: &Stats, parents: &[Parent], at: u64) {
        let before: BTreeMap<VgpuId, Vgpu> =
            self.vgpus.iter().map(|vgpu| (vgpu.uuid, vgpu.clone())).collect();
        for vgpu in vgpus {
            let about = vgpu.uuid.to_string();
            let was = before.get(&vgpu.uuid);
            let state = was.map_or(VgpuState::Stopped, |was| was.state);
            if state != vgpu.state {
                let reason = vgpu.reason.as_deref().map(|why| format!(": {why}"));
                let text = format!("{}{}", state_words(vgpu.state), reason.unwrap_or_default());
                self.event(at, "state", &about, text);
            }
            let was_vm = was.and_then(|was| was.vm).map(|vm| vm.pid);
            match (was_vm, vgpu.vm.map(|vm| vm.pid)) {
                (old, Some(pid)) if old != Some(pid) => {
                    self.event(at, "vm", &about, format!("VM attached: process {pid}"));
                }
                (Some(pid), None) => {
                    self.event(at, "vm", &about, format!("VM detached: process {pid}"));
                }
                _ => {}
            }
            let known = was.map(|was| was.warnings.as_slice()).unwrap_or_default();
            for warning in vgpu.warnings.iter().filter(|one| !known.contains(one)) {
                self.event(at, "warning", &about, warning.clone());
            }
        }
        for gone in before.values().filter(|was| vgpus.iter().all(|now| now.uuid != was.uuid)) {
            self.event(at, "state", &gone.uuid.to_string(), "Gone".to_owned());
        }
        self.faults(&stats.vgpus, at);
        let parents_before: BTreeMap<_, _> =
            self.parents.iter().map(|parent| (parent.name.clone(), parent.state)).collect();
        for parent in parents {
            if parents_before.get(&parent.name) != Some(&parent.state) {
                let text = format!("The GPU is {:?}", parent.state).to_lowercase();
                self.event(at, "state", &parent.name, text);
            }
        }
    }

    fn faults(&mut self, stats: &[VgpuStats], at: u64) {
        let before: BTreeMap<VgpuId, (u64, u64)> =
            self.stats.vgpus.iter().map(|one| (one.uuid, (one.faults, one.hang_resets))).collect();
        for one in stats {
            let (faults, hangs) = before.get(&one.uuid).copied().unwrap_or_default();
            let about = one.uuid.to_string();
            let hung = one.hang_resets.saturating_sub(hangs);
            let other = one.faults.saturating_sub(faults).saturating_sub(hung);
            if hung > 0 {
                self.event(at, "fault", &about, format!("{hung} hung, and reset"));
            }
            if other > 0 {
                self.event(at, "fault", &about, format!("{other} channel faults"));
            }
        }
    }
}

fn push<T>(kept: &mut VecDeque<T>, one: T, most: usize) {
    if kept.len() == most {
        kept.pop_front();
    }
    kept.push_back(one);
}

/// Whether a decision is worth a line: those that keep averages exact come many times a second.
fn for_people(decision: &SchedulerDecision) -> bool {
    !matches!(decision.cause.as_str(), "repay" | "cap" | "stale")
}

fn words(decision: &Decided) -> String {
    match decision {
        Decided::Timeslice { timeslice_us } => {
            format!("Time slice {:.1} ms", *timeslice_us as f64 / 1e3)
        }
        Decided::Cap { time_us, period_us } => {
            let (time, period) = (*time_us as f64 / 1e3, *period_us as f64 / 1e3);
            format!("At most {time:.1} ms of every {period:.1} ms")
        }
        Decided::NoCap => "No cap".to_owned(),
        Decided::Gate { open: true } => "Let in again".to_owned(),
        Decided::Gate { open: false } => "Held back".to_owned(),
    }
}

fn state_words(state: VgpuState) -> &'static str {
    match state {
        VgpuState::Stopped => "Stopped",
        VgpuState::Running => "Started",
        VgpuState::Restarting => "Its worker died and is being started again",
        VgpuState::Failed => "Failed",
    }
}
