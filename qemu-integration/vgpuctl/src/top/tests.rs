//! Tests of `top`: the screen against a golden file, and the keys.

use std::path::Path;
use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::{Value, json};

use super::app::App;
use super::view;

fn vgpu(last: u8, core: Option<u8>, share: f64, state: &str) -> Value {
    json!({
        "uuid": format!("11111111-1111-4111-8111-1111111111{last:02x}"), "parent": "soft0",
        "mdev_type": "SOFT-1Q", "state": state, "vram_bytes": 1_u64 << 30, "share_asked": core,
        "share_entitled": 10.0, "share_cap": if last == 3 { 10.0 } else { 100.0 },
        "mode": if last == 3 { "hard" } else { "soft" }, "priority": "normal", "timeslice_us": 3200,
        "share_measured": share, "share_of_busy": share, "runnable": true,
        "engine_ns": 12_345_678_901_u64, "wait_ns": 3_000_000_000_u64, "submissions": 1_000_000,
        "polled_doorbells": 999_990, "wakeups": 10, "preemptions": 77, "faults": 1,
        "engines": { "compute_ns": 10_000_000_000_u64, "copy_ns": 2_000_000_000_u64, "host_ns": 345_678_901 },
            "gated_ns": 500_000_000, "gate_closings": 12, "gate_cost_ns": 10_000_000, "throttled": 5,
            "slice_overruns": 2, "overrun_ns": 3_000_000, "stolen_ns": 100_000_000, "hang_resets": 1,
            "limits": {
                "channels": 32, "imported_bytes": 1_u64 << 42, "submissions_per_second": null,
                "refresh_per_second": 60, "hang_timeout_ms": 60_000, "acquire_timeout_ms": null,
            },
            "channels": 2, "imported_bytes": 512_u64 << 20,
        "traps": { "config": 0, "display": 0, "memory": 0, "control": 0, "mailbox": 0, "doorbell": 0 },
        "pid": 4711, "vm_pid": core.map(|_| 815), "programs": null,
    })
}

fn stats(share: f64, vgpus: usize) -> vgpud_api::Stats {
    let mut all = [
        vgpu(1, Some(80), share, "running"),
        vgpu(2, None, 99.5 - share, "running"),
        vgpu(3, Some(10), 0.0, "failed"),
    ];
    all[1]["programs"] = programs();
    for vgpu in [0, 2] {
        all[vgpu]["waits"] = json!(412);
        (all[vgpu]["wait_p50_us"], all[vgpu]["wait_p99_us"]) = (json!(820), json!(12_300));
    }
    all[0]["name"] = json!("web1");
    all[0]["vm_name"] = json!("vm1");
    let parent = |name: &str, busy: f64, free: u64| {
        json!({
            "parent": name, "window_ms": 1000, "busy": busy, "policy": "weighted",
            "ready": name == "soft0", "vram_bytes": 8_u64 << 30, "vram_free_bytes": free << 30,
        })
    };
    let parents = [parent("soft0", 99.5, 5), parent("soft1", 0.0, 8)];
    serde_json::from_value(json!({ "vgpus": all[..vgpus], "parents": parents })).unwrap()
}

/// Returns the state of a vGPU that programs use.
fn programs() -> Value {
    let process = |pid: i32, name: &str, bytes: u64| json!({ "pid": pid, "name": name, "vram_used_bytes": bytes });
    let processes = [process(816, "python3", 600 << 20), process(817, "a b", 0)];
    json!({ "vram_used_bytes": 700_u64 << 20, "processes": processes })
}

/// Returns the text on a terminal of this size.
fn screen(app: &mut App, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view::draw(frame, app)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(|y| row(y).trim_end().to_owned() + "\n").collect()
}

fn app() -> App {
    let mut app = App::new(None);
    let start = Instant::now();
    for (second, share) in (0..).zip([0.0, 20.0, 40.0, 60.0, 79.6]) {
        app.update(stats(share, 3), start + Duration::from_secs(second));
    }
    app
}

fn press(app: &mut App, code: KeyCode) -> bool {
    app.key(KeyEvent::new(code, KeyModifiers::NONE))
}

/// `UPDATE_GOLDEN=1 cargo test -p vgpuctl top` regenerates the file.
#[test]
fn the_screen_matches_the_golden_file() {
    let mut app = app();
    let wide = screen(&mut app, 120, 20);
    press(&mut app, KeyCode::Down);
    app.set_error("Cannot reach vgpud at /run/vgpud/control.sock".into());
    let narrow = screen(&mut app, 80, 10);
    app.error = None;
    let with_programs = screen(&mut app, 120, 20);
    let empty = screen(&mut App::new(None), 80, 5);
    let got = format!("{wide}----\n{narrow}----\n{with_programs}----\n{empty}");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/top.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&file, &got).unwrap();
    }
    let expected = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(got == expected, "{}: expected\n{expected}\ngot\n{got}", file.display());
}

/// At 80 columns the graph leaves the text whole, and the table has all its columns.
#[test]
fn a_narrow_terminal_cuts_no_text() {
    let mut app = app();
    let shown = screen(&mut app, 80, 24);
    for text in [
        "submitted 1000000 (0/s)  throttled 5  wake-ups 10",
        "due 10.0 %  at most 100 %  soft  normal priority  slice 3.2 ms",
        "ASKED % GOT % | asked",
        "waits 412 in the last 1 to 2 s, p50 820 us, p99 12.3 ms",
        "0.8/12.3 ms 1.0 GiB",
        "MEMORY         VM\n",
    ] {
        let has = |line: &str| (line.to_owned() + "\n").contains(text);
        assert!(shown.lines().any(has), "{text:?} is not in\n{shown}");
    }
    let narrower = screen(&mut app, 70, 24);
    assert!(narrower.contains("VM\n") && !narrower.contains(" WAIT "), "{narrower}");
    let wide = screen(&mut app, 120, 24);
    let graph = |line: &str| line.starts_with("video memory 1.0 GiB") && line.ends_with("████");
    assert!(wide.contains("HISTORY") && wide.lines().any(graph), "{wide}");
}

#[test]
fn drawing_works_at_every_terminal_size() {
    for size in 0..24 {
        screen(&mut app(), size, 20);
        screen(&mut app(), 120, size);
        screen(&mut app(), size, size);
    }
}

#[test]
fn arrows_select_and_q_quits() {
    let selected = |app: &App| app.selected().map(|(vgpu, _)| vgpu.uuid.to_string());
    let ends_in = |app: &App, end: &str| selected(app).is_some_and(|uuid| uuid.ends_with(end));
    let mut app = app();
    assert!(ends_in(&app, "01"));
    for (key, end) in [
        (KeyCode::Down, "02"),
        (KeyCode::End, "03"),
        (KeyCode::Down, "03"),
        (KeyCode::Up, "02"),
        (KeyCode::Home, "01"),
        (KeyCode::Up, "01"),
        (KeyCode::PageDown, "03"),
    ] {
        assert!(!press(&mut app, key));
        assert!(ends_in(&app, end), "{key:?}: {:?}", selected(&app));
    }
    press(&mut app, KeyCode::Left);
    assert_eq!((app.parents().count(), app.vgpus().count()), (1, 0), "soft1 alone");
    press(&mut app, KeyCode::Right);
    assert_eq!((app.parents().count(), app.vgpus().count()), (2, 3), "all again");
    assert!(press(&mut app, KeyCode::Char('q')));
    assert!(app.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
}

#[test]
fn the_selection_is_kept_until_the_vgpu_is_gone() {
    let mut app = app();
    press(&mut app, KeyCode::End);
    app.update(stats(50.0, 3), Instant::now());
    assert!(app.selected().is_some_and(|(vgpu, _)| vgpu.uuid.to_string().ends_with("03")));
    app.update(stats(50.0, 2), Instant::now());
    assert!(app.selected().is_some_and(|(vgpu, _)| vgpu.uuid.to_string().ends_with("01")));
    app.update(stats(50.0, 0), Instant::now());
    assert!(app.selected().is_none());
    press(&mut app, KeyCode::Down);
}
