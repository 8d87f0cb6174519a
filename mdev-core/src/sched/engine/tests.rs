//! What the scheduler tells the silicon, event by event.

use proptest::prelude::*;
use uuid::Uuid;

use super::*;
use crate::gpu::{Usage, UsageReport};
use crate::sched::Mode;
use crate::sched::policy::MAX_SLICE;

fn id(n: u8) -> VgpuId {
    VgpuId(Uuid::from_u128(u128::from(n)))
}

fn core(hundredths: u8) -> Option<Core> {
    Core::try_from(hundredths).ok()
}

fn started<'a>(id: VgpuId, core: Option<Core>) -> Event<'a> {
    Event::VgpuStarted { id, share: Share::of(core), max_instances: 8 }
}

fn changed<'a>(id: VgpuId, core: Option<Core>) -> Event<'a> {
    Event::ShareChanged { id, share: Share::of(core) }
}

fn scheduler() -> Scheduler {
    Scheduler::new(Config::new(Duration::from_millis(2)), Enforcement::Budgets, 0)
}

#[test]
fn a_vgpu_is_told_its_slice_and_others_theirs_where_it_changes() {
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
fn more_than_the_whole_gpu_is_refused_with_what_is_left() {
    let mut sched = scheduler();
    sched.handle(started(id(1), core(80))).unwrap();
    let error = sched.handle(started(id(2), core(30))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "Not enough of the GPU is left: core=30 asked, 20 of 100 left; \
         ask for 20 or less, or lower another vGPU's core"
    );
    sched.handle(started(id(2), core(20))).unwrap();
    let error = sched.check(Share::of(core(1))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "Not enough of the GPU is left: core=1 asked, 0 of 100 left; \
         lower another vGPU's core, or leave core out"
    );
    assert_eq!(sched.check(Share::default()), Ok(()));
    // A change counts without what the vGPU had before.
    sched.handle(changed(id(2), core(10))).unwrap();
    sched.handle(changed(id(1), core(90))).unwrap();
    assert!(sched.handle(changed(id(1), core(91))).is_err());
    assert_eq!(sched.left(), 0);
}

#[test]
fn events_for_vgpus_that_are_not_there_are_refused() {
    let mut sched = scheduler();
    let changed = sched.handle(changed(id(1), None));
    assert_eq!(changed, Err(ShareError::Unknown(id(1))));
    sched.handle(started(id(1), None)).unwrap();
    let again = sched.handle(started(id(1), None));
    assert_eq!(again, Err(ShareError::Duplicate(id(1))));
}

#[test]
fn corrections_are_dropped_when_measurements_stop() {
    let mut sched = scheduler();
    sched.handle(started(id(1), core(50))).unwrap();
    sched.handle(started(id(2), core(50))).unwrap();
    let usage =
        |engine_ns, wait_ns| Usage { engine_ns, wait_ns, runnable: true, ..Usage::default() };
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
fn a_change_among_many_is_told_to_one() {
    let overcommit = Config { overcommit: true, ..Config::new(Duration::from_micros(200)) };
    let mut sched = Scheduler::new(overcommit, Enforcement::Budgets, 0);
    for n in 0..=200 {
        sched.handle(started(id(n), core(1 + n % 4))).unwrap();
    }
    let told = sched.handle(changed(id(7), core(2))).unwrap();
    assert!(matches!(told[..], [Action::SetTimeslice(of, _)] if of == id(7)), "{told:?}");
    let told = sched.handle(changed(id(7), core(2))).unwrap();
    assert_eq!(told, [], "nothing has changed");
    let hard = Share { mode: Mode::Hard, ..Share::of(core(2)) };
    let told = sched.handle(Event::ShareChanged { id: id(7), share: hard }).unwrap();
    assert!(matches!(told[..], [Action::SetBudget(of, Some(_))] if of == id(7)), "{told:?}");
}

#[test]
fn a_scheduler_dates_its_first_decisions_by_its_own_start() {
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

proptest! {
    #[test]
    fn whatever_happens_the_invariants_hold(steps in prop::collection::vec(any_step(), 0..80)) {
        let mut sched = scheduler();
        let mut slices = BTreeMap::new();
        for step in steps {
            let ask = |asked: Option<u8>| asked.and_then(core);
            let actions = match step {
                Step::Start(n, asked) => {
                    sched.handle(started(id(n), ask(asked)))
                }
                Step::Stop(n) => {
                    slices.remove(&id(n));
                    sched.handle(Event::VgpuStopped { id: id(n) })
                }
                Step::Change(n, asked) => {
                    sched.handle(changed(id(n), ask(asked)))
                }
                Step::Policy(policy) => sched.handle(Event::ConfigChanged(
                    Config { policy, ..sched.config() }
                )),
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
            for action in actions.unwrap_or_default() {
                if let Action::SetTimeslice(id, slice) = action {
                    prop_assert!(sched.groups.contains_key(&id), "told of one that is gone");
                    prop_assert!((MIN_SLICE..=MAX_SLICE).contains(&slice));
                    slices.insert(id, slice);
                }
            }
            // What the silicon was told is what the scheduler thinks it has.
            prop_assert_eq!(slices.len(), sched.groups.len());
            for (id, slice) in &slices {
                prop_assert_eq!(sched.slice(*id), Some(*slice));
            }
            // Sums that were kept up to date are those that were worked out again.
            let mut weights = Weights::default();
            sched.groups.iter().for_each(|(id, group)| weights.insert(*id, group));
            let fresh = weights.plan(sched.policy());
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * a.abs().max(b.abs());
            prop_assert!(
                sched.groups.values().all(|group| near(fresh.part(group), sched.plan.part(group)))
            );
            // Slices of those who owe nothing are in proportion to weights, as far as their bounds allow it.
            let free: Vec<f64> = sched
                .groups
                .values()
                .filter(|group| near(group.correction * group.boost, 1.0))
                .filter_map(|group| Some((group.slice?, sched.plan.weight(group))))
                .filter(|(slice, _)| *slice > MIN_SLICE && *slice < MAX_SLICE)
                .map(|(slice, weight)| slice.as_secs_f64() / weight)
                .collect();
            let most = free.iter().copied().fold(0.0, f64::max);
            prop_assert!(free.iter().all(|one| one / most >= 0.95), "{:?}", free);
            let asked: u32 = sched
                .groups
                .values()
                .map(Group::asked)
                .sum();
            prop_assert_eq!(asked + u32::from(sched.left()), 100);
        }
    }
}
