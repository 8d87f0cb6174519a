//! Metrics in Prometheus' format, and `vgpuctl top` on a terminal.

// Compared numbers are exact integers.
#![allow(clippy::float_cmp)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};

use anyhow::{Context, Result, ensure};
use mdev_core::definition::ATTRIBUTES;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::Signal;
use serde_json::json;
use system_tests::{Vgpud, kill_process, vgpuctl, wait_for};

/// Parses samples by name with labels. Text that violates the format or its conventions is an
/// error.
fn parse(text: &str) -> Result<BTreeMap<String, f64>> {
    let (mut kinds, mut helps) = (BTreeMap::new(), BTreeMap::new());
    let mut samples = BTreeMap::new();
    let mut families = Vec::new();
    ensure!(text.ends_with('\n'), "The last line has no end");
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').context("HELP without a text")?;
            ensure!(helps.insert(name, help).is_none(), "{name} has two HELP lines");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').context("TYPE without a kind")?;
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
            ensure!(name.starts_with("tessera_"), "{name} has no prefix");
            ensure!((*kind == "counter") == name.ends_with("_total"), "{name} is a {kind}");
            for unit in ["_ns", "_us", "_ms", "_mib", "_kb", "_percent", "_milliseconds"] {
                ensure!(!name.contains(unit), "{name} is not in a base unit");
            }
            for unit in ["_seconds", "_bytes", "_ratio"] {
                let at_the_end = name.strip_suffix("_total").unwrap_or(name).ends_with(unit);
                ensure!(at_the_end || !name.contains(unit), "the unit of {name} is not at the end");
            }
            for kind in ["_gauge", "_counter", "_vec", "_count", "_sum", "_bucket"] {
                ensure!(!name.ends_with(kind), "the name of {name} contains its kind");
            }
            let value: f64 = value.parse().with_context(|| format!("{line:?}"))?;
            ensure!(value.is_finite() && value >= 0.0, "{line:?}");
            ensure!(samples.insert(key.to_owned(), value).is_none(), "{key} occurs twice");
        }
    }
    Ok(samples)
}

#[test]
fn metrics_follow_prometheus_conventions() -> Result<()> {
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
    let info = format!(
        r#"tessera_vgpu_info{{name="",parent="soft0",type="SOFT-256MQ",vgpu="{uuid}",vm=""}}"#
    );
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
    let waits = "tessera_vgpu_wait_quantile_seconds";
    assert!(samples.keys().all(|key| !key.starts_with(waits)), "nothing has waited");
    assert_eq!(of("channels_limit")?, 64.0);
    assert!(of("imported_memory_limit_bytes")? > 0.0);
    vgpud.call("POST", &format!("/v1/vgpus/{uuid}/stop"), None)?;
    assert!(scrape()?.keys().all(|key| !key.contains(&uuid)), "the sample is gone with its vGPU");
    Ok(())
}

#[test]
fn every_attribute_and_counter_is_documented() -> Result<()> {
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

/// Opens both ends of a terminal of that size. No child process inherits them: the terminal must
/// close with this process.
fn terminal(columns: u16, rows: u16) -> Result<(OwnedFd, OwnedFd)> {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let unlocked: libc::c_int = 0;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    let done = |result: libc::c_int| match result {
        -1 => Err(std::io::Error::last_os_error()),
        result => Ok(result),
    };
    // SAFETY: the call takes flags and returns a new descriptor.
    let master = done(unsafe { libc::posix_openpt(flags) })?;
    // SAFETY: the call above has just created the descriptor, and nothing else owns it.
    let master = unsafe { OwnedFd::from_raw_fd(master) };
    let raw = master.as_raw_fd();
    // SAFETY: the terminal is open; the calls read an integer and a size.
    let slave = unsafe {
        done(libc::ioctl(raw, libc::TIOCSPTLCK, &raw const unlocked))?;
        done(libc::ioctl(raw, libc::TIOCSWINSZ, &raw const size))?;
        done(libc::ioctl(raw, libc::TIOCGPTPEER, flags))?
    };
    // SAFETY: as above.
    Ok((master, unsafe { OwnedFd::from_raw_fd(slave) }))
}

/// `vgpuctl top` on its own terminal.
struct Top {
    child: Child,
    /// Master end: nonblocking and not shared.
    master: Option<File>,
    seen: Vec<u8>,
}

impl Top {
    /// Starts `top` and waits until it shows a vGPU. With `leads`, `top` leads a session with this
    /// terminal and gets SIGHUP when the terminal closes.
    fn start(vgpud: &Vgpud, uuid: &str, interval: &str, leads: bool) -> Result<Self> {
        let (master, slave) = terminal(100, 24)?;
        let mut command = Command::new(vgpuctl::path()?);
        command.arg("--socket").arg(vgpud.api_socket()).args(["top", "--interval", interval]);
        command.env("TERM", "xterm-256color");
        let stdio = |fd: &OwnedFd| -> Result<std::process::Stdio> { Ok(fd.try_clone()?.into()) };
        command.stdin(stdio(&slave)?).stdout(stdio(&slave)?).stderr(stdio(&slave)?);
        // SAFETY: between fork and exec only system calls are made: setsid and setting the
        // terminal.
        unsafe {
            command.pre_exec(move || {
                nix::unistd::setsid()?;
                if leads && libc::ioctl(0, libc::TIOCSCTTY, 0) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let child = command.spawn()?;
        drop(command);
        drop(slave);
        fcntl(&master, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let mut top = Self { child, master: Some(master.into()), seen: Vec::new() };
        wait_for("the vGPU is on the screen", || top.seen().contains(&uuid[..8]))?;
        Ok(top)
    }

    /// Returns everything drawn so far.
    fn seen(&mut self) -> String {
        let mut bytes = [0; 4096];
        while let Some(Ok(len @ 1..)) = self.master.as_mut().map(|end| end.read(&mut bytes)) {
            self.seen.extend_from_slice(&bytes[..len]);
        }
        String::from_utf8_lossy(&self.seen).into_owned()
    }

    fn ends(&mut self, why: &str) -> Result<ExitStatus> {
        let mut status = None;
        wait_for(why, || {
            status = self.child.try_wait().ok().flatten();
            status.is_some()
        })?;
        status.context("top has ended")
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn top_draws_on_a_terminal_and_restores_it() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))?;
    let mut top = Top::start(&vgpud, &uuid, "100", true)?;
    assert!(top.seen().contains("\u{1b}[?1049h"), "on the alternate screen");
    top.master.as_mut().context("A terminal")?.write_all(b"\x1b[B\x1b[Aq")?;
    let status = top.ends("q leaves")?;
    wait_for("the previous screen is restored", || top.seen().contains("\u{1b}[?1049l"))?;
    assert!(status.success(), "{status:?}: {}", top.seen());
    Ok(())
}

#[test]
fn top_ends_with_its_terminal() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))?;
    // The next refresh is a minute away, and without a session no signal arrives.
    for leads in [true, false] {
        let mut top = Top::start(&vgpud, &uuid, "60000", leads)?;
        top.master = None;
        let status = top.ends("a terminal that is gone ends it")?;
        assert!(status.success(), "{leads}: {status:?}");
    }
    for signal in [Signal::SIGHUP, Signal::SIGTERM] {
        let mut top = Top::start(&vgpud, &uuid, "60000", true)?;
        kill_process(top.child.id(), signal)?;
        let status = top.ends(&format!("{signal} ends it"))?;
        wait_for("the previous screen is restored", || top.seen().contains("\u{1b}[?1049l"))?;
        assert!(status.success(), "{signal}: {status:?}");
    }
    Ok(())
}
