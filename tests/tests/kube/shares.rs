//! Engine time of pods.

use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::lab_cluster::LabCluster;
use crate::pods::{Pod, Pods, Size};

/// Largest difference between a share asked for and a share measured, in points.
const MARGIN: f64 = 2.0;
/// Time in which all pods reach their shares.
const SETTLE: Duration = Duration::from_secs(2);
/// Time of a measurement.
const TIME: Duration = Duration::from_secs(20);
/// Pods with their sizes. Together, they have all of the GPU's time.
const PODS: [(&str, Size); 3] =
    [("quarter", Size::Quarter), ("other-quarter", Size::Quarter), ("half", Size::Half)];

/// Returns the pods' parts of the work that they report meanwhile, in percent.
fn measure(pods: &Pods<'_>) -> Result<[f64; PODS.len()]> {
    let read = || PODS.iter().map(|(name, ..)| pods.work(name)).collect::<Result<Vec<_>>>();
    let before = read()?;
    thread::sleep(TIME);
    let after = read()?;
    // Rounds in the pod's own time: the outputs are read one after the other.
    let rate = |pod: usize| (after[pod].0 - before[pod].0) as f64 / (after[pod].1 - before[pod].1);
    let rates: [f64; PODS.len()] = std::array::from_fn(rate);
    let all: f64 = rates.iter().sum();
    Ok(rates.map(|rate| rate * 100.0 / all))
}

/// Checks that pods that together have the whole GPU get the shares that they ask for.
pub fn are_kept(pods: &Pods<'_>) -> Result<()> {
    for (name, size) in PODS {
        pods.start(&Pod::new(name, "computes", size))?;
    }
    for (name, ..) in PODS {
        pods.work(name)?;
    }
    thread::sleep(SETTLE);
    let measured = measure(pods)?;
    for ((name, size), measured) in PODS.into_iter().zip(measured) {
        let asked = f64::from(size.core());
        println!("{name}: {measured:.1} % of {asked:.0} %");
        ensure!((measured - asked).abs() <= MARGIN, "{name}: {measured:.1} of {asked:.0}");
    }
    PODS.iter().try_for_each(|(name, ..)| pods.delete(name))
}

#[test]
#[ignore = "runs a Kubernetes cluster"]
fn pods_get_the_shares_that_they_ask_for() -> Result<()> {
    let Some(lab) = LabCluster::start()? else { return Ok(()) };
    are_kept(&lab.pods())
}
