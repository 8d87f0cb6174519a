//! The alerts and the dashboard in `packaging/`, checked by Prometheus' own promtool.

#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use lab::checkers::Checkers;
use lab::guest::Output;
use lab::progress::Progress;
use serde_json::Value;
use system_tests::skipped;

const RULES: &str = "tessera-rules.yml";
const TESTS: &str = "tessera-rules.test.yml";

fn source(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).unwrap()
}

/// Returns all queries of the dashboard, with values for Grafana's variables.
fn queries(panels: &Value) -> Vec<String> {
    let panels = panels.as_array().into_iter().flatten();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let query = |target: &Value| {
        let query = target["expr"].as_str().unwrap();
        let query = query.replace("$__rate_interval", "1m");
        ["$instance", "$parent", "$vgpu"]
            .iter()
            .fold(query, |query, name| query.replace(name, ".*"))
    };
    targets.map(query).collect()
}

#[test]
#[ignore = "fetches Prometheus' checker: cargo lab test runs it"]
fn promtool_accepts_alerts_and_dashboard() {
    if let Some(reason) = Checkers::impossible() {
        skipped(&format!("promtool: {reason}"));
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let checkers = Checkers::open(&Progress::new()).unwrap();
    let check = |command: &str| {
        let Output { status, stdout, stderr } = checkers.run(scratch.path(), command).unwrap();
        assert_eq!(status, 0, "{command}: {stdout}{stderr}");
        stdout
    };
    fs::write(scratch.path().join(RULES), source("packaging/prometheus/tessera-rules.yml"))
        .unwrap();
    fs::write(scratch.path().join(TESTS), source("tests/tests/qemu/tessera-rules.test.yml"))
        .unwrap();
    let found = check(&format!("promtool check rules --lint=all --lint-fatal {RULES}"));
    assert!(found.contains("7 rules found"), "{found}");
    check(&format!("promtool test rules {TESTS}"));

    // Each query of the dashboard as a rule, which promtool parses.
    let dashboard: Value = serde_json::from_str(&source("packaging/grafana/tessera.json")).unwrap();
    let queries = queries(&dashboard["panels"]);
    assert!(queries.len() > 15, "{queries:?}");
    let mut rules = "groups:\n  - name: dashboard\n    rules:\n".to_owned();
    for (index, query) in queries.iter().enumerate() {
        let query = Value::from(query.as_str());
        writeln!(rules, "      - {{ record: 'query:{index}', expr: {query} }}").unwrap();
    }
    fs::write(scratch.path().join("dashboard.yml"), rules).unwrap();
    check("promtool check rules dashboard.yml");
}
