//! Consoles: viewers see what the guest draws, only authenticated viewers connect, a static screen
//! costs nothing, and keys reach the VM that uses the vGPU.

mod viewer;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use rfb::canvas::Canvas;
use rfb::handshake;
use serde_json::{Value, json};
use system_tests::vgpuctl::{self, refused};
use system_tests::{TIMEOUT, Vgpud, kill_process, monitor, wait_for};

use self::viewer::{DESKTOP_SIZE, RAW, TIGHT_PNG, Viewer, ZRLE, let_in};

const DISPLAY: u32 = 2;
const FRAMEBUFFER: u32 = 0;
const ORANGE: [u8; 3] = [0xff, 0xa5, 0];

/// A VM that draws.
struct Guest(vfio_user::Client);

impl Guest {
    fn attach(vgpud: &Vgpud, uuid: &str) -> Result<Self> {
        Ok(Self(vfio_user::Client::new(&vgpud.vfio_socket(uuid))?))
    }

    /// Sets a mode with 32 bits per pixel through the Bochs registers.
    fn mode(&mut self, width: u16, height: u16) -> Result<()> {
        for (index, value) in [(4, 0), (1, width), (2, height), (3, 32), (4, 0x41)] {
            self.0.region_write(DISPLAY, 0x500 + 2 * index, &value.to_le_bytes())?;
        }
        // VGA attribute port: display not blanked.
        Ok(self.0.region_write(DISPLAY, 0x400, &[0x20])?)
    }

    /// Draws the beginning of the screen.
    fn draw(&mut self, at: u64, pixels: usize, [red, green, blue]: [u8; 3]) -> Result<()> {
        Ok(self.0.region_write(FRAMEBUFFER, at * 4, &[blue, green, red, 0].repeat(pixels))?)
    }
}

/// A running `vgpuctl view`, ended when dropped.
struct View {
    child: Child,
    says: Value,
}

impl View {
    fn start(vgpud: &Vgpud, uuid: &str, more: &[&str]) -> Result<Self> {
        let mut command = Command::new(vgpuctl::path()?);
        command.arg("--socket").arg(vgpud.api_socket());
        command.args(["view", uuid, "--print", "--output", "json"]).args(more);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("An output")?;
        BufReader::new(stdout).read_line(&mut line)?;
        let says = serde_json::from_str(&line).unwrap_or_default();
        Ok(Self { child, says })
    }

    fn socket(&self) -> Result<PathBuf> {
        Ok(self.says["socket"].as_str().with_context(|| format!("{}", self.says))?.into())
    }

    fn connect(&self, encodings: &[i32]) -> Result<Viewer<UnixStream>> {
        let mut stream = UnixStream::connect(self.socket()?)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let_in(&mut stream, |_| [0; 16])?.context("The server asks for a password")?;
        Viewer::new(stream, encodings)
    }
}

impl Drop for View {
    fn drop(&mut self) {
        let _ = kill_process(self.child.id(), Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

fn start(vgpud: &Vgpud, mdev_type: &str) -> Result<String> {
    vgpud.create(&json!({ "mdev_type": mdev_type, "run": true }))
}

#[test]
fn a_viewer_sees_drawing_as_it_happens() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "SOFT-256MQ")?;
    let mut guest = Guest::attach(&vgpud, &uuid)?;
    guest.mode(200, 150)?;
    guest.draw(0, 200, ORANGE)?;
    let view = View::start(&vgpud, &uuid, &[])?;
    let socket = view.socket()?;
    let mode = |path: &Path| fs::metadata(path).map(|meta| meta.permissions().mode() & 0o777);
    assert_eq!(mode(&socket)?, 0o600, "only its owner may connect");
    assert_eq!(mode(socket.parent().context("A folder")?)?, 0o700);
    for encoding in [RAW, ZRLE, TIGHT_PNG] {
        let mut viewer = view.connect(&[encoding])?;
        assert_eq!(
            (viewer.size, viewer.name.as_str()),
            ((200, 150), &*format!("vGPU {uuid} (view only)"))
        );
        viewer.ask(false)?;
        viewer.update()?;
        assert_eq!(viewer.rects, [[0, 0, 200, 150]]);
        for (x, y, colour) in [(0, 0, ORANGE), (199, 0, ORANGE), (0, 1, [0; 3]), (199, 149, [0; 3])]
        {
            assert_eq!(viewer.pixel(x, y), colour, "encoding {encoding}: {x}, {y}");
        }
        // The request precedes the drawing: the update comes with the drawing and covers it
        // exactly.
        viewer.ask(true)?;
        guest.draw(200 * 70 + 66, 3, [1, 2, 3])?;
        viewer.update()?;
        assert_eq!(viewer.rects, [[64, 64, 64, 64]], "one tile has changed");
        assert_eq!((viewer.pixel(66, 70), viewer.pixel(69, 70)), ([1, 2, 3], [0; 3]));
        guest.draw(200 * 70 + 66, 3, [0; 3])?;
    }
    drop(view);
    assert!(!socket.exists(), "the socket is removed with the command");
    Ok(())
}

#[test]
fn a_viewer_follows_mode_changes() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "SOFT-1Q")?;
    let view = View::start(&vgpud, &uuid, &[])?;
    let mut viewer = view.connect(&[ZRLE, DESKTOP_SIZE])?;
    viewer.ask(false)?;
    viewer.update()?;
    let (width, height) = viewer.size;
    let lit =
        (0..width * height).filter(|at| viewer.pixel(at % width, at / width) != [0; 3]).count();
    assert!(lit > 100, "the picture says that the screen is off");
    let mut guest = Guest::attach(&vgpud, &uuid)?;
    for size in [(640_u16, 480_u16), (1920, 1080)] {
        guest.mode(size.0, size.1)?;
        guest.draw(0, 16, ORANGE)?;
        let wanted = (usize::from(size.0), usize::from(size.1));
        // While the mode is being set, intermediate modes may be visible.
        wait_for("mode and picture have changed", || {
            viewer.ask(true).and_then(|()| viewer.update()).is_ok()
                && viewer.size == wanted
                && viewer.pixel(15, 0) == ORANGE
        })?;
        guest.draw(0, 16, [0; 3])?;
    }
    // A viewer that cannot resize keeps its size and continues.
    let mut fixed = view.connect(&[RAW])?;
    guest.mode(800, 600)?;
    guest.draw(0, 16, ORANGE)?;
    wait_for("the viewer sees the new picture at the old size", || {
        fixed.ask(true).and_then(|()| fixed.update()).is_ok() && fixed.pixel(15, 0) == ORANGE
    })?;
    assert_eq!(fixed.size, (1920, 1080));
    Ok(())
}

#[test]
fn a_viewer_stays_connected_while_a_vgpu_restarts() -> Result<()> {
    let mut vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "SOFT-256MQ")?;
    let mut guest = Guest::attach(&vgpud, &uuid)?;
    guest.mode(1024, 768)?;
    guest.draw(0, 16, ORANGE)?;
    let view = View::start(&vgpud, &uuid, &[])?;
    let mut viewer = view.connect(&[ZRLE, DESKTOP_SIZE])?;
    viewer.ask(false)?;
    viewer.update()?;
    assert_eq!(viewer.pixel(15, 0), ORANGE);
    let dark = |viewer: &Viewer<UnixStream>| {
        let lit = (0..1024 * 768).filter(|at| viewer.pixel(at % 1024, at / 1024) != [0; 3]);
        viewer.pixel(15, 0) == [0; 3] && (100..10_000).contains(&lit.count())
    };
    let sees = |viewer: &mut Viewer<UnixStream>, what: &str, seen: &dyn Fn(&Viewer<_>) -> bool| {
        wait_for(what, || viewer.ask(true).and_then(|()| viewer.update()).is_ok() && seen(viewer))
    };
    // libvirt's hook restarts a VM by a stop and a start of a vGPU with the same name.
    vgpud.call("POST", &format!("/v1/vgpus/{uuid}/stop"), Some(&json!({ "force": true })))?;
    let gone = Canvas::with_text("The vGPU is gone", 0, (1024, 768));
    let said = |viewer: &Viewer<UnixStream>| {
        (0..768).all(|y| {
            let mut row = gone.rgb(y, 0, 1024).enumerate();
            row.all(|(x, colour)| viewer.pixel(x, y as usize) == colour)
        })
    };
    sees(&mut viewer, "the picture says that the vGPU is gone", &said)?;
    assert_eq!(viewer.size, (1024, 768), "the window keeps its size");
    vgpud.create(&json!({ "uuid": uuid, "mdev_type": "SOFT-256MQ", "run": true }))?;
    let mut guest = Guest::attach(&vgpud, &uuid)?;
    guest.mode(1024, 768)?;
    guest.draw(0, 16, [1, 2, 3])?;
    sees(&mut viewer, "the picture is back", &|viewer| viewer.pixel(15, 0) == [1, 2, 3])?;
    // A worker dies; the next one continues.
    let worker = u32::try_from(vgpud.show(&uuid)?["pid"].as_u64().context("A worker")?)?;
    kill_process(worker, Signal::SIGKILL)?;
    guest.draw(0, 16, [4, 5, 6])?;
    sees(&mut viewer, "the picture changes", &|viewer| viewer.pixel(15, 0) == [4, 5, 6])?;
    // The anchor dies; the next worker's screen is empty.
    kill_process(vgpud.anchor(&uuid)?, Signal::SIGKILL)?;
    sees(&mut viewer, "the picture says that the screen is off", &dark)?;
    // The end of vgpud ends the connection.
    viewer.ask(true)?;
    vgpud.end(Signal::SIGTERM)?;
    wait_for("the connection ends", || viewer.ask(true).and_then(|()| viewer.update()).is_err())
}

#[test]
fn view_survives_a_restart_of_vgpud_and_ends_with_its_vgpu() -> Result<()> {
    let mut vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "SOFT-256MQ")?;
    Guest::attach(&vgpud, &uuid)?.mode(64, 48)?;
    let mut view = View::start(&vgpud, &uuid, &[])?;
    view.connect(&[RAW])?;
    vgpud.end(Signal::SIGUSR1)?;
    vgpud.start_again()?;
    let mut viewer = view.connect(&[ZRLE, DESKTOP_SIZE])?;
    viewer.ask(false)?;
    viewer.update()?;
    vgpud.call("POST", &format!("/v1/vgpus/{uuid}/stop"), Some(&json!({ "force": true })))?;
    let mut status = None;
    wait_for("view ends with its vGPU", || {
        status = view.child.try_wait().ok().flatten();
        status.is_some()
    })?;
    assert_eq!(status.and_then(|status| status.code()), Some(4));
    let mut said = String::new();
    view.child.stderr.take().context("No pipe")?.read_to_string(&mut said)?;
    let gone = format!("vgpuctl: vGPU {uuid} is gone: it is neither running nor defined; ");
    assert!(said.starts_with(&gone) && said.lines().count() == 1, "{said}");
    Ok(())
}

#[test]
fn loopback_viewers_need_the_password_of_this_run() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "SOFT-256MQ")?;
    let mut guest = Guest::attach(&vgpud, &uuid)?;
    guest.mode(64, 48)?;
    let mut view = View::start(&vgpud, &uuid, &["--tcp"])?;
    let address = view.says["address"].as_str().context("An address")?.to_owned();
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    let password: [u8; 8] =
        view.says["password"].as_str().context("A password")?.as_bytes().try_into()?;
    let connect = |password: [u8; 8]| -> Result<Option<TcpStream>> {
        let mut stream = TcpStream::connect(&address)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let answer = |challenge| handshake::answer(challenge, &password);
        Ok(let_in(&mut stream, answer)?.map(|()| stream))
    };
    assert!(connect(*b"password")?.is_none(), "a wrong password");
    let mut viewer = Viewer::new(connect(password)?.context("The right password")?, &[RAW])?;
    viewer.ask(false)?;
    viewer.update()?;
    assert_eq!(viewer.size, (64, 48));
    for _ in 0..4 {
        assert!(connect(*b"passwore")?.is_none());
    }
    let mut status = None;
    wait_for("wrong guesses end the command", || {
        status = view.child.try_wait().ok().flatten();
        status.is_some()
    })?;
    assert_eq!(status.and_then(|status| status.code()), Some(1));
    let mut said = String::new();
    view.child.stderr.take().context("No pipe")?.read_to_string(&mut said)?;
    assert!(said.contains(" wrong passwords, possibly guesses; run the command again"), "{said}");
    Ok(())
}

#[test]
fn vgpus_that_cannot_be_viewed_are_refused_in_one_line() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let shown = start(&vgpud, "SOFT-256MQ")?;
    let headless = start(&vgpud, "SOFT-256MC")?;
    let unknown = "99999999-9999-4999-8999-999999999999";
    refused(&vgpud, &format!("view {headless}"), 5, "no display head")?;
    refused(&vgpud, &format!("view {unknown}"), 4, "vgpuctl list")?;
    let with_monitor = |path: &Path| format!("view {shown} --print --monitor {}", path.display());
    refused(&vgpud, &with_monitor(&vgpud.api_socket()), 5, "No VM is attached")?;
    let _guest = Guest::attach(&vgpud, &shown)?;
    refused(
        &vgpud,
        &with_monitor(&vgpud.api_socket()),
        5,
        " cannot be used: it belongs to process",
    )?;
    refused(&vgpud, &with_monitor(Path::new("/nowhere/qmp.sock")), 5, "No such file")?;
    let path = format!("/v1/vgpus/{shown}/console");
    let (_, code, message) = vgpud.refused("POST", &path, None)?;
    assert!(code == "invalid" && message.contains("Upgrade: rfb"), "{message}");
    let view = View::start(&vgpud, &shown, &[])?;
    let viewers = (0..8).map(|_| view.connect(&[RAW])).collect::<Result<Vec<_>>>()?;
    refused(&vgpud, &format!("view {shown} --print"), 5, "close one first")?;
    drop(viewers);
    wait_for("there is room again", || {
        View::start(&vgpud, &shown, &[]).is_ok_and(|v| v.socket().is_ok())
    })
}

#[test]
fn invalid_viewer_messages_end_only_their_connection() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "SOFT-256MQ")?;
    let mut guest = Guest::attach(&vgpud, &uuid)?;
    guest.mode(64, 48)?;
    let view = View::start(&vgpud, &uuid, &[])?;
    for garbage in
        [&[9][..], &[2, 0, 0xff, 0xff], &[6, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], &[0xff; 64]]
    {
        let mut viewer = view.connect(&[RAW])?;
        viewer.send(garbage)?;
        assert!(viewer.update().is_err(), "{garbage:?}");
    }
    // Clipboard text is skipped, in whatever pieces it arrives.
    let mut viewer = view.connect(&[RAW])?;
    viewer.send(&[6, 0, 0, 0, 0, 0, 0x20, 0])?;
    for _ in 0..8 {
        viewer.send(&[3; 0x400])?;
    }
    viewer.ask(false)?;
    viewer.update()?;
    assert_eq!(viewer.rects.len(), 1);
    Ok(())
}

#[test]
fn keys_reach_the_vm_of_the_vgpu() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "SOFT-256MQ")?;
    let mut guest = Guest::attach(&vgpud, &uuid)?;
    guest.mode(640, 480)?;
    let path = vgpud.run_dir().join("qmp.sock");
    let events = monitor::listen(&path, json!([]))?;
    let view = View::start(&vgpud, &uuid, &["--monitor", &path.to_string_lossy()])?;
    let mut viewer = view.connect(&[RAW])?;
    assert!(!viewer.name.contains("view only"), "{}", viewer.name);
    viewer.key(true, 0x61)?;
    let key = |name: &str, down: bool| {
        let key = json!({ "type": "qcode", "data": name });
        json!([{ "type": "key", "data": { "down": down, "key": key } }])
    };
    assert_eq!(events.recv_timeout(TIMEOUT)?, key("a", true));
    drop(viewer);
    assert_eq!(
        events.recv_timeout(TIMEOUT)?,
        key("a", false),
        "keys are released when the viewer leaves"
    );
    // Without a monitor, keys are dropped.
    drop(view);
    let view = View::start(&vgpud, &uuid, &[])?;
    let mut viewer = view.connect(&[RAW])?;
    viewer.key(true, 0x61)?;
    viewer.ask(false)?;
    viewer.update()?;
    assert!(events.try_recv().is_err());
    Ok(())
}

#[test]
fn a_static_screen_is_hardly_read() -> Result<()> {
    const WATCHED: Duration = Duration::from_secs(4);
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "SOFT-1Q")?;
    let mut guest = Guest::attach(&vgpud, &uuid)?;
    guest.mode(1920, 1200)?;
    let view = View::start(&vgpud, &uuid, &[])?;
    let mut viewer = view.connect(&[ZRLE])?;
    viewer.ask(false)?;
    viewer.update()?;
    assert_eq!(viewer.size, (1920, 1200));
    // What is read counts, not the CPU time: that depends on what else the machine does.
    let frames_read = |after: u64| -> Result<f64> {
        std::thread::sleep(Duration::from_millis(after));
        let before = bytes_read(vgpud.pid().context("vgpud runs")?)?;
        std::thread::sleep(WATCHED);
        let read = bytes_read(vgpud.pid().context("vgpud runs")?)? - before;
        Ok(read as f64 / f64::from(1920 * 1200 * 4))
    };
    let alone = frames_read(1200)?;
    viewer.ask(true)?;
    // A screen counts as changing for one second and is read often for five more.
    let watched = frames_read(7500)?;
    println!("1920 by 1200, still: {watched:.2} frames in 4 s, and {alone:.2} without a viewer");
    assert!(alone < 0.1 && watched > 0.0 && watched < 3.0, "{watched:.2} frames, {alone:.2} alone");
    // A changed row is still seen.
    guest.draw(1920 * 777, 5, ORANGE)?;
    viewer.update()?;
    assert_eq!(viewer.pixel(4, 777), ORANGE);
    Ok(())
}

/// Returns the bytes that a process has read by system calls (proc_pid_io(5)).
fn bytes_read(pid: u32) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io"))?;
    let count = text.lines().find_map(|line| line.strip_prefix("rchar: ")).context("rchar")?;
    Ok(count.parse()?)
}
