//! Engine time of pods.

use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::lab_cluster::LabCluster;
use crate::pods::Pod;

/// Largest difference between a share asked for and a share measured, in points.
const MARGIN: f64 = 2.0;
/// Time of a measurement.
const TIME: Duration = Duration::from_secs(6);
/// Pods with their resources and shares in percent. A type has the part of the GPU's time that it has
/// of the GPU's memory. Together, the pods have all of it.
const PODS: [(&str, &str, f64); 3] = [
    ("quarter", "tessera.io/soft-2c", 25.0),
    ("other-quarter", "tessera.io/soft-2c", 25.0),
    ("half", "tessera.io/soft-4c", 50.0),
];

/// Returns the pods' parts of the work that they report meanwhile, in percent.
fn measure(lab: &LabCluster) -> Result<[f64; PODS.len()]> {
    let pods = lab.pods();
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

#[test]
#[ignore = "runs a Kubernetes cluster"]
fn pods_get_the_shares_that_they_ask_for() -> Result<()> {
    let Some(lab) = LabCluster::start()? else { return Ok(()) };
    let pods = lab.pods();
    for (name, resource, _) in PODS {
        pods.start(&Pod::new(name, "computes", resource))?;
    }
    for (name, ..) in PODS {
        pods.work(name)?;
    }
    let measured = measure(&lab)?;
    for ((name, resource, asked), measured) in PODS.into_iter().zip(measured) {
        println!("{name} ({resource}): {measured:.1} % of {asked:.0} %");
        ensure!((measured - asked).abs() <= MARGIN, "{name}: {measured:.1} of {asked:.0}");
    }
    Ok(())
}
