//! Actions of the scheduler for each event.

use std::collections::BTreeMap;

use proptest::prelude::*;
use uuid::Uuid;

use super::demand::Demand;
use super::weights::Weights;
use super::*;
use crate::gpu::Usage;
use crate::sched::Mode;
use crate::sched::policy::{MAX_SLICE, SHORTEST_SLICE};

fn id(n: u8) -> VgpuId {
    VgpuId(Uuid::from_u128(u128::from(n)))
}

fn core(percent: u8) -> Option<Core> {
    Core::try_from(percent).ok()
}

fn started<'a>(id: VgpuId, core: Option<Core>) -> Event<'a> {
    Event::VgpuStarted { id, share: ShareRequest::with_core(core), max_instances: 8 }
}

fn changed<'a>(id: VgpuId, core: Option<Core>) -> Event<'a> {
    Event::ShareChanged { id, share: ShareRequest::with_core(core) }
}

fn scheduler() -> Scheduler {
    Scheduler::new(Config::new(Duration::from_millis(2)), Enforcement::Budgets, 0)
}

#[test]
fn a_start_or_stop_sets_the_slices_that_change() {
    let mut sched = scheduler();
    let ms = Duration::from_millis;
    let us = Duration::from_micros;
    let none = |id| Action::SetBudget(id, None);
    assert_eq!(
        sched.handle(started(id(1), core(80))).unwrap(),
        [Action::SetTimeslice(id(1), ms(2)), none(id(1)), Action::Gate(id(1), true)]
    );
    assert_eq!(
        sched.handle(started(id(2), core(20))).unwrap(),
        [
            Action::SetTimeslice(id(1), us(3200)),
            Action::SetTimeslice(id(2), us(800)),
            none(id(2)),
            Action::Gate(id(2), true)
        ]
    );
    assert_eq!(sched.entitled(id(2)), Some(0.2));
    assert_eq!(
        sched.handle(Event::VgpuStopped { id: id(1) }).unwrap(),
        [Action::SetTimeslice(id(2), ms(2))]
    );
    assert_eq!(sched.handle(Event::VgpuStopped { id: id(1) }).unwrap(), []);
}

#[test]
fn a_request_for_more_than_is_left_is_refused() {
    let mut sched = scheduler();
    sched.handle(started(id(1), core(80))).unwrap();
    let error = sched.handle(started(id(2), core(30))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "Not enough of the GPU is left: core=30 asked, 20 of 100 left; \
         ask for 20 or less, or lower another vGPU's core"
    );
    sched.handle(started(id(2), core(20))).unwrap();
    let error = sched.check(ShareRequest::with_core(core(1))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "Not enough of the GPU is left: core=1 asked, 0 of 100 left; \
         lower another vGPU's core, or leave core out"
    );
    assert_eq!(sched.check(ShareRequest::default()), Ok(()));
    // The new request replaces the old one of the same vGPU.
    sched.handle(changed(id(2), core(10))).unwrap();
    sched.handle(changed(id(1), core(90))).unwrap();
    assert!(sched.handle(changed(id(1), core(91))).is_err());
    assert_eq!(sched.left(), 0);
}

#[test]
fn events_for_unknown_or_duplicate_vgpus_are_refused() {
    let mut sched = scheduler();
    let changed = sched.handle(changed(id(1), None));
    assert_eq!(changed, Err(ShareError::Unknown(id(1))));
    sched.handle(started(id(1), None)).unwrap();
    let again = sched.handle(started(id(1), None));
    assert_eq!(again, Err(ShareError::Duplicate(id(1))));
}

#[test]
fn corrections_are_dropped_when_readings_stop() {
    let mut sched = scheduler();
    sched.handle(started(id(1), core(50))).unwrap();
    sched.handle(started(id(2), core(50))).unwrap();
    let usage = |engine_ns, wait_ns| Usage {
        engine_ns,
        wait_ns,
        preemptions: engine_ns / 1_000_000,
        runnable: true,
        ..Usage::default()
    };
    let report = |now_ns, a, b| UsageReport {
        now_ns,
        vgpus: vec![(id(1), usage(a, b)), (id(2), usage(b, a))],
    };
    sched.handle(Event::UsageReport(&report(0, 0, 0))).unwrap();
    let used = report(100_000_000, 80_000_000, 20_000_000);
    let actions = sched.handle(Event::UsageReport(&used)).unwrap();
    assert_eq!(actions.len(), 2);
    assert!(sched.slice(id(1)) < sched.slice(id(2)));
    assert_eq!(sched.handle(Event::Tick { now_ns: 1_100_000_000 }).unwrap(), []);
    assert_eq!(sched.handle(Event::Tick { now_ns: 1_100_000_001 }).unwrap().len(), 2);
    assert_eq!(sched.slice(id(1)), sched.slice(id(2)));
}

#[test]
fn a_change_among_many_vgpus_concerns_one() {
    let overcommit = Config { overcommit: true, ..Config::new(Duration::from_micros(200)) };
    let mut sched = Scheduler::new(overcommit, Enforcement::Budgets, 0);
    for n in 0..=200 {
        sched.handle(started(id(n), core(1 + n % 4))).unwrap();
    }
    let actions = sched.handle(changed(id(7), core(2))).unwrap();
    assert!(matches!(actions[..], [Action::SetTimeslice(of, _)] if of == id(7)), "{actions:?}");
    let actions = sched.handle(changed(id(7), core(2))).unwrap();
    assert_eq!(actions, [], "nothing has changed");
    let hard = ShareRequest { mode: Mode::Hard, ..ShareRequest::with_core(core(2)) };
    let actions = sched.handle(Event::ShareChanged { id: id(7), share: hard }).unwrap();
    assert!(matches!(actions[..], [Action::SetBudget(of, Some(_))] if of == id(7)), "{actions:?}");
}

#[test]
fn first_decisions_have_the_time_of_the_scheduler_start() {
    let now_ns = 77_000_000_000;
    let config = Config::new(Duration::from_millis(2));
    let mut sched = Scheduler::new(config, Enforcement::Budgets, now_ns);
    sched.handle(started(id(1), core(80))).unwrap();
    assert!(sched.log().iter().all(|record| record.at_ns == now_ns));
}

#[derive(Clone, Debug)]
enum Step {
    Start(u8, Option<u8>),
    Stop(u8),
    Change(u8, Option<u8>),
    Policy(Policy),
    Report(u64, Vec<(u8, u64, u64)>),
    Tick(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    let asked = || prop::option::of(1..=100_u8);
    prop_oneof![
        (0..12_u8, asked()).prop_map(|(id, core)| Step::Start(id, core)),
        (0..12_u8).prop_map(Step::Stop),
        (0..12_u8, asked()).prop_map(|(id, core)| Step::Change(id, core)),
        prop::sample::select(&Policy::ALL[..]).prop_map(Step::Policy),
        (any::<u64>(), prop::collection::vec(any::<(u8, u64, u64)>(), 0..12))
            .prop_map(|(at, usage)| Step::Report(at, usage)),
        any::<u64>().prop_map(Step::Tick),
    ]
}

/// Passes a step to the scheduler. Returns no actions for a refused event.
fn apply(sched: &mut Scheduler, step: Step) -> Vec<Action> {
    let result = match step {
        Step::Start(n, asked) => sched.handle(started(id(n), asked.and_then(core))),
        Step::Stop(n) => sched.handle(Event::VgpuStopped { id: id(n) }),
        Step::Change(n, asked) => sched.handle(changed(id(n), asked.and_then(core))),
        Step::Policy(policy) => {
            sched.handle(Event::ConfigChanged(Config { policy, ..sched.config() }))
        }
        Step::Report(now_ns, usages) => {
            let vgpus = usages.into_iter().map(|(n, engine_ns, wait_ns)| {
                let runnable = n % 4 != 0;
                (id(n % 12), Usage { engine_ns, wait_ns, runnable, ..Usage::default() })
            });
            let report = UsageReport { now_ns, vgpus: vgpus.collect() };
            sched.handle(Event::UsageReport(&report))
        }
        Step::Tick(now_ns) => sched.handle(Event::Tick { now_ns }),
    };
    result.unwrap_or_default()
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

proptest! {
    #[test]
    fn invariants_hold_after_any_sequence_of_events(
        steps in prop::collection::vec(any_step(), 0..80),
    ) {
        let mut sched = scheduler();
        let mut slices = BTreeMap::new();
        for step in steps {
            if let Step::Stop(n) = step {
                slices.remove(&id(n));
            }
            for action in apply(&mut sched, step) {
                if let Action::SetTimeslice(id, slice) = action {
                    prop_assert!(sched.groups.contains_key(&id), "action for a stopped vGPU");
                    prop_assert!((SHORTEST_SLICE..=MAX_SLICE).contains(&slice));
                    slices.insert(id, slice);
                }
            }
            // The GPU's slices are the scheduler's.
            prop_assert_eq!(slices.len(), sched.groups.len());
            for (id, slice) in &slices {
                prop_assert_eq!(sched.slice(*id), Some(*slice));
            }
            // Incremental sums match sums from scratch.
            let mut weights = Weights::default();
            sched.groups.iter().for_each(|(id, group)| weights.insert(*id, &group.share));
            let fresh = weights.plan(sched.policy());
            let plan = sched.slices.plan();
            let same = |share| near(fresh.part(share), plan.part(share));
            prop_assert!(sched.groups.values().all(|group| same(&group.share)));
            // Slices of vGPUs without debts and with the same demand are in proportion to weights,
            // within their bounds.
            for demand in [Demand::Idle, Demand::Brief, Demand::Competing] {
                let length = sched.slices.pace().length(demand);
                let (shortest, longest) = (length.shortest, length.longest.min(MAX_SLICE));
                let free: Vec<f64> = sched
                    .groups
                    .values()
                    .filter(|group| group.demand == demand)
                    .filter(|group| near(group.debt.correction() * group.share.boost(), 1.0))
                    .filter_map(|group| Some((group.share.slice()?, plan.weight(&group.share))))
                    .filter(|(slice, _)| *slice > shortest && *slice < longest)
                    .map(|(slice, weight)| slice.as_secs_f64() / weight)
                    .collect();
                let most = free.iter().copied().fold(0.0, f64::max);
                prop_assert!(free.iter().all(|scale| scale / most >= 0.85), "{:?}", free);
            }
            let requested: u32 =
                sched.groups.values().map(|group| group.share.requested()).sum();
            prop_assert_eq!(requested + u32::from(sched.left()), 100);
        }
    }
}
