//! Metrics in Prometheus' format, served on loopback.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use axum::Router;
use axum::routing::get;
use prometheus::{
    Encoder, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder, register_histogram_vec_with_registry, register_int_counter_vec_with_registry,
    register_int_counter_with_registry, register_int_gauge_vec_with_registry,
    register_int_gauge_with_registry,
};

/// Counters of the agent. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Registry,
    allocations: IntCounterVec,
    registrations: IntCounterVec,
    reaped: IntCounter,
    calls: IntCounterVec,
    call_seconds: HistogramVec,
    publications: IntCounter,
    claims: IntGauge,
    devices: IntGaugeVec,
}

impl Metrics {
    /// Creates the metrics, all zero.
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let counters = |name: &str, help: &str, labels: &[&str]| {
            let opts = Opts::new(format!("tessera_kube_{name}"), help);
            register_int_counter_vec_with_registry!(opts, labels, registry)
        };
        Ok(Self {
            allocations: counters(
                "device_plugin_allocations_total",
                "Devices given to containers by device plugins",
                &["resource", "result"],
            )?,
            registrations: counters(
                "device_plugin_registrations_total",
                "Registrations of device plugins at kubelet",
                &["resource"],
            )?,
            reaped: register_int_counter_with_registry!(
                "tessera_kube_leftover_vgpus_stopped_total",
                "vGPUs without a pod or claim that were stopped",
                registry
            )?,
            calls: counters(
                "claims_total",
                "Claims that were prepared and unprepared",
                &["call", "result"],
            )?,
            call_seconds: register_histogram_vec_with_registry!(
                "tessera_kube_claim_seconds",
                "Time to prepare or unprepare a claim",
                &["call"],
                vec![0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0],
                registry
            )?,
            publications: register_int_counter_with_registry!(
                "tessera_kube_slice_writes_total",
                "Writes of the node's ResourceSlice",
                registry
            )?,
            claims: register_int_gauge_with_registry!(
                "tessera_kube_prepared_claims",
                "Claims that are prepared",
                registry
            )?,
            devices: register_int_gauge_vec_with_registry!(
                "tessera_kube_gpus",
                "Physical GPUs of the ResourceSlice",
                &["health"],
                registry
            )?,
            registry,
        })
    }

    /// Counts an allocation of a device plugin.
    pub fn count_allocation(&self, resource: &str, succeeded: bool) {
        self.allocations.with_label_values(&[resource, result(succeeded)]).inc();
    }

    /// Counts a registration of a device plugin.
    pub fn count_registration(&self, resource: &str) {
        self.registrations.with_label_values(&[resource]).inc();
    }

    /// Counts a vGPU that was stopped because it had no pod or claim.
    pub fn count_reaped(&self) {
        self.reaped.inc();
    }

    /// Counts a claim that was prepared or unprepared.
    pub fn count_call(&self, call: &str, succeeded: bool, took: Duration) {
        self.calls.with_label_values(&[call, result(succeeded)]).inc();
        self.call_seconds.with_label_values(&[call]).observe(took.as_secs_f64());
    }

    /// Counts a write of the node's ResourceSlice.
    pub fn count_publication(&self) {
        self.publications.inc();
    }

    /// Sets the number of prepared claims.
    pub fn set_claims(&self, count: usize) {
        self.claims.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Sets the numbers of healthy and lost physical GPUs.
    pub fn set_devices(&self, healthy: usize, lost: usize) {
        for (health, count) in [("healthy", healthy), ("lost", lost)] {
            self.devices.with_label_values(&[health]).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Returns the metrics as text.
    pub fn text(&self) -> String {
        let mut text = Vec::new();
        // Writing to a vector does not fail.
        let _ = TextEncoder::new().encode(&self.registry.gather(), &mut text);
        String::from_utf8(text).unwrap_or_default()
    }

    /// Serves the metrics at `/metrics` of a loopback address, until the future is dropped.
    pub async fn serve(self, address: SocketAddr) -> anyhow::Result<()> {
        ensure!(
            address.ip().is_loopback(),
            "--metrics: {address} is reachable from other hosts; give an address of loopback (127.0.0.1:9470)"
        );
        let listener = tokio::net::TcpListener::bind(address).await;
        let listener =
            listener.with_context(|| format!("--metrics: cannot listen at {address}"))?;
        let router = Router::new().route("/metrics", get(move || async move { self.text() }));
        Ok(axum::serve(listener, router).await?)
    }
}

fn result(succeeded: bool) -> &'static str {
    if succeeded { "success" } else { "error" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn metrics_are_served_on_loopback_only() {
        let metrics = Metrics::new().unwrap();
        metrics.count_call("prepare", true, Duration::from_millis(20));
        metrics.set_devices(1, 0);
        let text = metrics.text();
        assert!(
            text.contains(r#"tessera_kube_claims_total{call="prepare",result="success"} 1"#),
            "{text}"
        );
        assert!(text.contains(r#"tessera_kube_gpus{health="healthy"} 1"#), "{text}");
        let error = metrics.clone().serve(([0, 0, 0, 0], 0).into()).await.unwrap_err().to_string();
        assert!(error.contains("is reachable from other hosts"), "{error}");
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let error = metrics.serve(taken.local_addr().unwrap()).await.unwrap_err();
        assert!(error.to_string().starts_with("--metrics: cannot listen at 127.0.0.1"), "{error}");
    }
}
