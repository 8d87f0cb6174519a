//! What is promised to those who watch: metrics that Prometheus reads, and `vgpuctl top` on a terminal.

// Numbers that are compared are whole, and exact.
#![allow(clippy::float_cmp)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use mdev_core::definition::ATTRIBUTES;
use serde_json::json;
use system_tests::{Vgpud, program, wait_for};

/// Samples of a text in Prometheus' format, by name with labels. What breaks the format or its conventions is an error.
fn parse(text: &str) -> Result<BTreeMap<String, f64>> {
    let (mut kinds, mut helps) = (BTreeMap::new(), BTreeMap::new());
    let mut samples = BTreeMap::new();
    let mut families = Vec::new();
    ensure!(text.ends_with('\n'), "The last line has no end");
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').context("A help without words")?;
            ensure!(helps.insert(name, help).is_none(), "{name} is explained twice");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').context("A type without a word")?;
            ensure!(kinds.insert(name, kind).is_none(), "{name} has two types");
        } else {
            let (key, value) = line.rsplit_once(' ').with_context(|| format!("{line:?}"))?;
            let (name, labels) = key.split_once('{').unwrap_or((key, "}"));
            ensure!(name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{name:?}");
            if families.last() != Some(&name) {
                ensure!(!families.contains(&name), "{name}'s samples are not together");
                families.push(name);
            }
            for label in labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty()) {
                let quoted = label.split_once('=').and_then(|(label, value)| {
                    let plain = label.bytes().all(|b| b.is_ascii_lowercase());
                    value.strip_prefix('"')?.strip_suffix('"').filter(|_| plain)
                });
                ensure!(quoted.is_some_and(|value| !value.contains('"')), "{line:?}");
            }
            let kind = kinds.get(name).with_context(|| format!("{name} has no type before it"))?;
            ensure!(helps.get(name).is_some_and(|help| help.ends_with('.')), "{name} has no help");
            ensure!(name.starts_with("tessera_"), "{name} does not say whose it is");
            ensure!((*kind == "counter") == name.ends_with("_total"), "{name} is a {kind}");
            for unit in ["_ns", "_us", "_ms", "_mib", "_kb", "_percent", "_milliseconds"] {
                ensure!(!name.contains(unit), "{name} is not in a base unit");
            }
            for unit in ["_seconds", "_bytes", "_ratio"] {
                let at_the_end = name.strip_suffix("_total").unwrap_or(name).ends_with(unit);
                ensure!(at_the_end || !name.contains(unit), "{name} has its unit in the middle");
            }
            for kind in ["_gauge", "_counter", "_vec", "_count", "_sum", "_bucket"] {
                ensure!(!name.ends_with(kind), "{name} says what it is by its name");
            }
            let value: f64 = value.parse().with_context(|| format!("{line:?}"))?;
            ensure!(value.is_finite() && value >= 0.0, "{line:?}");
            ensure!(samples.insert(key.to_owned(), value).is_none(), "{key} is there twice");
        }
    }
    Ok(samples)
}

#[test]
fn metrics_are_prometheus_text_by_its_conventions() -> Result<()> {
    let vgpud = Vgpud::start_with(&["--parent", "soft:soft0,vram=1G", "--parent", "soft:b"])?;
    let request = json!({
        "mdev_type": "SOFT-256MQ", "parent": "soft0", "attrs": [{ "core": "80" }], "run": true,
    });
    let uuid = vgpud.create(&request)?;
    let scrape = || -> Result<_> {
        let (status, body) = vgpud.request("GET", "/metrics", None)?;
        ensure!(status == 200, "{status}");
        parse(&String::from_utf8(body)?)
    };
    let samples = scrape()?;
    let value =
        |key: &str| samples.get(key).copied().with_context(|| format!("{key}: {samples:?}"));
    assert_eq!(value(r#"tessera_parent_up{parent="b"}"#)?, 1.0);
    assert_eq!(value(r#"tessera_parent_video_memory_bytes{parent="soft0"}"#)?, f64::from(1 << 30));
    assert_eq!(
        value(r#"tessera_parent_video_memory_free_bytes{parent="soft0"}"#)?,
        f64::from(3 << 28)
    );
    let info = format!(r#"tessera_vgpu_info{{parent="soft0",type="SOFT-256MQ",vgpu="{uuid}"}}"#);
    assert_eq!(value(&info)?, 1.0);
    let of = |name: &str| value(&format!("tessera_vgpu_{name}{{vgpu=\"{uuid}\"}}"));
    assert!((of("share_asked_ratio")? - 0.8).abs() < 1e-9);
    assert_eq!(of("video_memory_bytes")?, f64::from(1 << 28));
    for counter in [
        "wait_seconds",
        "gated_seconds",
        "gate_closings",
        "gate_cost_seconds",
        "submissions",
        "throttled_submissions",
        "polled_doorbells",
        "wakeups",
        "preemptions",
        "slice_overruns",
        "overrun_seconds",
        "stolen_seconds",
        "faults",
        "hang_resets",
    ] {
        assert_eq!(of(&format!("{counter}_total"))?, 0.0);
    }
    for engine in ["copy", "compute", "host"] {
        let labels = format!(r#"{{engine="{engine}",vgpu="{uuid}"}}"#);
        assert_eq!(value(&format!("tessera_vgpu_engine_seconds_total{labels}"))?, 0.0);
    }
    assert_eq!(of("channels_limit")?, 32.0);
    assert!(of("imported_memory_limit_bytes")? > 0.0);
    vgpud.call("POST", &format!("/v1/vgpus/{uuid}/stop"), None)?;
    assert!(scrape()?.keys().all(|key| !key.contains(&uuid)), "it is gone with its vGPU");
    Ok(())
}

#[test]
fn every_attribute_and_counter_is_in_the_documents() -> Result<()> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let limits = fs::read_to_string(docs.join("limits.md"))?;
    let scheduling = fs::read_to_string(docs.join("scheduling.md"))?;
    for attribute in ATTRIBUTES {
        let name = format!("| `{}` |", attribute.name);
        assert!(limits.contains(&name) || scheduling.contains(&name), "{}", attribute.name);
    }
    let vgpud = Vgpud::start()?;
    vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))?;
    let text = String::from_utf8(vgpud.request("GET", "/metrics", None)?.1)?;
    for line in text.lines() {
        let counter = line.strip_prefix("# TYPE tessera_vgpu_");
        if let Some(name) = counter.and_then(|rest| rest.strip_suffix(" counter")) {
            assert!(limits.contains(name), "{name} is not in docs/limits.md");
        }
    }
    Ok(())
}

/// The two ends of a terminal of that size.
fn terminal(columns: u16, rows: u16) -> Result<(OwnedFd, OwnedFd)> {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let (mut master, mut slave) = (-1, -1);
    let none = std::ptr::null_mut();
    // SAFETY: both places are ours and written to; there is no name and no mode; the size is read.
    let done = unsafe {
        libc::openpty(&raw mut master, &raw mut slave, none, none.cast(), &raw const size)
    };
    ensure!(done == 0, std::io::Error::last_os_error());
    // SAFETY: the call has just made both, and nobody else has them.
    Ok(unsafe { (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) })
}

#[test]
fn top_draws_on_a_terminal_and_gives_it_back() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))?;
    let (master, slave) = terminal(100, 24)?;
    let mut command = Command::new(program("vgpuctl", "vgpuctl")?);
    command.arg("--socket").arg(vgpud.api_socket()).args(["top", "--interval", "100"]);
    command.env("TERM", "xterm-256color");
    let stdio = |fd: &OwnedFd| -> Result<std::process::Stdio> { Ok(fd.try_clone()?.into()) };
    command.stdin(stdio(&slave)?).stdout(stdio(&slave)?).stderr(stdio(&slave)?);
    // SAFETY: between fork and exec only system calls are made: a session of its own, with this terminal.
    unsafe {
        command.pre_exec(|| {
            nix::unistd::setsid()?;
            match libc::ioctl(0, libc::TIOCSCTTY, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    let mut child = command.spawn()?;
    drop(command);
    drop(slave);
    let mut terminal = File::from(master);
    let mut keys = terminal.try_clone()?;
    // Whatever is drawn, until the other end is closed.
    let (sender, drawn) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(len @ 1..) = terminal.read(&mut bytes) {
            let _ = sender.send(bytes[..len].to_vec());
        }
    });
    let mut seen = Vec::new();
    wait_for("the vGPU is on the screen", || {
        seen.extend(drawn.try_iter().flatten());
        String::from_utf8_lossy(&seen).contains(&uuid[..8])
    })?;
    assert!(String::from_utf8_lossy(&seen).contains("\u{1b}[?1049h"), "on a screen of its own");
    keys.write_all(b"\x1b[B\x1b[Aq")?;
    let mut status = None;
    wait_for("q leaves", || {
        status = child.try_wait().ok().flatten();
        status.is_some()
    })?;
    reader.join().ok().context("The reader panicked")?;
    seen.extend(drawn.try_iter().flatten());
    let seen = String::from_utf8_lossy(&seen);
    assert!(status.is_some_and(|status| status.success()), "{status:?}: {seen}");
    assert!(seen.contains("\u{1b}[?1049l"), "the screen from before is back: {seen}");
    Ok(())
}
