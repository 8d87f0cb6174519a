//! `cargo lab attack`: attacks on the promises of docs/security.md, each with its result.
//!
//! An attack is one or more tests that play a tenant, a taken-over process or another user of the
//! host against the real daemon or the part that is to withstand. `cargo lab test` runs the same
//! tests among all others. Here they run one attack at a time, also beside busy loops, and the
//! result says which promise does not hold.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::heartbeat::{Heartbeat, INTERVAL};
use crate::progress;
use crate::test::{Built, Failure, Tested};

mod catalogue;

use self::catalogue::ATTACKS;

/// What an attack tries, and the tests that try it.
#[derive(Debug)]
struct Attack {
    /// Name on the command line.
    name: &'static str,
    /// What the attacker does, and what it is to reach.
    what: &'static str,
    /// Modules of tests, as `package/program/module`, or `package/program` for all of its tests.
    tests: &'static [&'static str],
}

/// Which attacks run, and how.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Names of attacks; all if there is none
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// Print the attacks and their tests, and run nothing
    #[arg(long)]
    pub list: bool,
    /// Run N busy loops beside the attacks
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub busy: u16,
}

/// Result of an attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// All of its tests passed, or those that this machine can run.
    Held,
    /// A test failed.
    Reached,
    /// This machine cannot run any of its tests.
    Skipped,
}

impl Outcome {
    fn of(tested: &Tested) -> Self {
        match tested.tally {
            tally if tally.failed > 0 => Self::Reached,
            tally if tally.passed > 0 => Self::Held,
            _ => Self::Skipped,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Reached => "REACHED",
            Self::Skipped => "skipped",
        }
    }
}

/// Runs the attacks. Returns true if none has reached anything.
pub fn run(options: &Options) -> Result<bool> {
    let chosen = choose(&options.names)?;
    if options.list {
        for Attack { name, what, tests } in chosen {
            println!("{name}: {what}");
            for test in *tests {
                println!("    {test}");
            }
        }
        return Ok(true);
    }
    let built = Built::build()?;
    let _load = Load::start(options.busy);
    let outcomes: Vec<_> = chosen.into_iter().map(|attack| attack.run(&built)).collect();
    let count = |wanted| outcomes.iter().filter(|outcome| **outcome == wanted).count();
    let (held, skipped) = (count(Outcome::Held), count(Outcome::Skipped));
    println!("\n{held} of {} attacks reached nothing, {skipped} skipped", outcomes.len());
    Ok(held + skipped == outcomes.len())
}

/// Checks that each attack has tests. Fails with the modules that have none.
pub(crate) fn check(built: &Built) -> Result<()> {
    let tests = ATTACKS.iter().flat_map(|attack| attack.tests);
    let missing: Vec<_> = tests.filter(|name| built.jobs_of(name).is_empty()).copied().collect();
    if !missing.is_empty() {
        bail!("Attacks of `cargo lab attack` without tests: {}", missing.join(", "));
    }
    Ok(())
}

/// Returns the attacks of these names, or all.
fn choose(names: &[String]) -> Result<Vec<&'static Attack>> {
    if let Some(name) = names.iter().find(|name| ATTACKS.iter().all(|one| one.name != **name)) {
        bail!("There is no attack {name}; `cargo lab attack --list` prints all");
    }
    let chosen = |attack: &&Attack| names.is_empty() || names.iter().any(|one| one == attack.name);
    Ok(ATTACKS.iter().filter(chosen).collect())
}

impl Attack {
    /// Runs the tests and prints the result, and what tests that failed have printed.
    fn run(&self, built: &Built) -> Outcome {
        let (name, start) = (self.name, Instant::now());
        let heartbeat = Heartbeat::start(INTERVAL, move |since| {
            println!("{}", progress::running(name, since, ""));
        });
        let mut tested = Tested::default();
        for test in self.tests {
            let jobs = built.jobs_of(test);
            if jobs.is_empty() {
                tested.add(Tested::failed(Failure::new(format!("{test}: there is no such test"))));
            }
            for job in jobs {
                let finished = job.run_buffered();
                if finished.result.tally.failed > 0 && finished.result.failures.is_empty() {
                    println!("{}", String::from_utf8_lossy(&finished.output));
                }
                tested.add(finished.result);
            }
        }
        drop(heartbeat);
        let outcome = Outcome::of(&tested);
        let (word, seconds) = (outcome.word(), start.elapsed().as_secs_f64());
        println!("{word:8} {seconds:5.1} s  {name}: {} ({})", self.what, tested.tally);
        for Failure { name, output } in &tested.failures {
            println!("    {name}");
            for line in output {
                println!("        {line}");
            }
        }
        outcome
    }
}

/// Threads that take all the time of a CPU that they get.
struct Load {
    stop: &'static AtomicBool,
}

impl Load {
    fn start(threads: u16) -> Self {
        let stop: &AtomicBool = Box::leak(Box::default());
        for _ in 0..threads {
            thread::spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        Self { stop }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::test::Tally;

    #[test]
    fn attacks_are_chosen_by_name() {
        let one = choose(&[ATTACKS[1].name.to_owned()]).unwrap();
        assert_eq!(one.iter().map(|attack| attack.name).collect::<Vec<_>>(), [ATTACKS[1].name]);
        assert_eq!(choose(&[]).unwrap().len(), ATTACKS.len());
        let error = choose(&["sesame".to_owned()]).unwrap_err();
        assert!(error.to_string().contains("sesame"), "{error}");
        let names: BTreeSet<_> = ATTACKS.iter().map(|attack| attack.name).collect();
        assert_eq!(names.len(), ATTACKS.len(), "each name is another one");
    }

    #[test]
    fn one_failed_test_is_enough_and_one_passed_test_is_needed() {
        let of = |passed, failed, skipped| Outcome::of(&Tally { passed, failed, skipped }.into());
        assert_eq!(of(3, 0, 1), Outcome::Held);
        assert_eq!(of(3, 1, 0), Outcome::Reached);
        assert_eq!(of(0, 0, 2), Outcome::Skipped);
        assert_eq!(of(0, 0, 0), Outcome::Skipped);
    }
}
