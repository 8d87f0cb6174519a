//! The web console in a real browser, and a vGPU's screen in a real VNC client.
//!
//! The lab fetches both into its cache. `UPDATE_IMAGES=1` updates the pictures of docs/console.md.

mod chromium;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::progress::Progress;
use lab::viewers::Viewers;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::load::Endless;
use system_tests::vgpuctl::{self, vgpuctl};
use system_tests::{TIMEOUT, Vgpud, kill_process, monitor, skipped};

use self::chromium::Chromium;

const DISPLAY: u32 = 2;
const FRAMEBUFFER: u32 = 0;
const WIDTH: u16 = 800;
const HEIGHT: u16 = 600;

/// Returns the programs, `None` if they cannot be fetched.
fn viewers() -> Option<Viewers> {
    match Viewers::open(&Progress::new()) {
        Ok(viewers) => Some(viewers),
        Err(error) => {
            skipped(&format!("a browser: {error:#}"));
            None
        }
    }
}

/// A VM that draws a picture with a different colour at every pixel.
struct Guest(vfio_user::Client);

impl Guest {
    fn draw(vgpud: &Vgpud, uuid: &str) -> Result<Self> {
        let mut guest = Self(vfio_user::Client::new(&vgpud.vfio_socket(uuid))?);
        for (index, value) in [(4, 0), (1, WIDTH), (2, HEIGHT), (3, 32), (4, 0x41)] {
            guest.0.region_write(DISPLAY, 0x500 + 2 * index, &value.to_le_bytes())?;
        }
        guest.0.region_write(DISPLAY, 0x400, &[0x20])?;
        for y in 0..HEIGHT {
            let row: Vec<u8> = (0..WIDTH).flat_map(|x| colour(x, y)).collect();
            guest.0.region_write(FRAMEBUFFER, u64::from(y) * row.len() as u64, &row)?;
        }
        Ok(guest)
    }
}

/// Bytes of a pixel in memory: blue, green, red, unused.
fn colour(x: u16, y: u16) -> [u8; 4] {
    let part = |at: u16, of: u16| u32::from(at) * 255 / u32::from(of - 1);
    let [red, green] = [part(x, WIDTH), part(y, HEIGHT)];
    let grid = x % 100 < 2 || y % 100 < 2;
    if grid { [0xff, 0xff, 0xff, 0] } else { [0x60, green as u8, red as u8, 0] }
}

fn save(name: &str, png: &[u8]) -> Result<()> {
    if std::env::var_os("UPDATE_IMAGES").is_some() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/images");
        fs::write(docs.join(name), png)?;
    }
    Ok(())
}

fn start(vgpud: &Vgpud, mdev_type: &str, core: &str) -> Result<String> {
    vgpud.create(&json!({
        "mdev_type": mdev_type, "attrs": [{ "core": core }, { "hang_timeout": "off" }], "run": true, "define": true,
    }))
}

/// Returns a number on a vGPU's card: `got` or `asked`.
fn share(page: &mut Chromium, uuid: &str, which: usize) -> Result<f64> {
    let text = page.eval(&format!(
        "document.querySelectorAll('[data-uuid=\"{uuid}\"] .legend b')[{which}].textContent"
    ))?;
    let text = text.as_str().context("A text")?;
    Ok(text.trim_end_matches(" %").parse()?)
}

#[test]
#[ignore = "starts a browser: run `cargo lab test`"]
fn the_page_shows_shares_and_opens_screens() -> Result<()> {
    let Some(viewers) = viewers() else { return Ok(()) };
    let vgpud = Vgpud::start_with(&["--web", "127.0.0.1:0"])?;
    let shown = start(&vgpud, "SOFT-1Q", "20")?;
    let guest = Guest::draw(&vgpud, &shown)?;
    let path = vgpud.run_dir().join("qmp.sock");
    let keys = monitor::listen(&path, json!([{ "current": true, "absolute": true }]))?;
    let busy = [start(&vgpud, "SOFT-1Q", "60")?, start(&vgpud, "SOFT-256MQ", "20")?];
    let mut page = Chromium::start(&viewers, 1280, 900)?;

    // Without a ticket the page only asks for one.
    let url = vgpuctl(&vgpud, &format!("web --monitor {shown}={}", path.display()))?;
    let home = url.split('#').next().context("An address")?.to_owned();
    page.open(&home)?;
    page.until(
        "document.querySelector('#door') !== null && !document.querySelector('#door').hidden",
    )?;
    assert_eq!(page.eval("document.querySelector('#console').hidden")?, true);
    let refused = page.eval("fetch('/api/state/0/0').then((answer) => answer.status)")?;
    assert_eq!(refused, 401);
    // The browser logs the refused requests, which the test caused.
    page.eval("new Promise((done) => setTimeout(done, 200))")?;
    page.errors.clear();

    let mut loads = Vec::new();
    for uuid in &busy {
        loads.push(Endless::start(&vgpud, uuid)?);
    }
    // An open page follows the new fragment without loading again.
    page.open("about:blank")?;
    page.open(&url)?;
    page.until(&format!(
        "document.querySelector('[data-uuid=\"{shown}\"] img')?.naturalWidth === 480"
    ))?;
    assert_eq!(page.eval("location.hash")?, "", "the ticket is not left in the history");

    cards_show_shares(&vgpud, &mut page, &busy)?;
    if std::env::var_os("UPDATE_IMAGES").is_some() {
        // Collects data for the charts.
        std::thread::sleep(Duration::from_secs(20));
    }
    page.scheme("light")?;
    save("console-web.png", &page.picture()?)?;
    page.scheme("dark")?;
    save("console-web-dark.png", &page.picture()?)?;
    drop(loads);

    screen_shows_pixels(&mut page, &shown, guest)?;
    save("console-web-screen.png", &page.picture()?)?;

    input_reaches_the_vm(&mut page, &keys)?;
    page.click("#close")?;
    page.until("!document.querySelector('#screen').open")?;
    let errors: Vec<_> = page.errors.drain(..).collect();
    assert!(errors.is_empty(), "errors on the page: {errors:?}");
    Ok(())
}

/// The cards show the API's numbers: 60 to 20, of what the third vGPU does not use.
fn cards_show_shares(vgpud: &Vgpud, page: &mut Chromium, busy: &[String; 2]) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    let (asked, got) = loop {
        let asked = [share(page, &busy[0], 1)?, share(page, &busy[1], 1)?];
        let got = [share(page, &busy[0], 0)?, share(page, &busy[1], 0)?];
        if got[0] + got[1] > 90.0 && got[0] > 2.0 * got[1] || Instant::now() > deadline {
            break (asked, got);
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    assert_eq!(format!("{asked:?}"), "[60.0, 20.0]");
    let stats = vgpud.get("/v1/stats")?;
    let measured = |uuid: &str| {
        let all = stats["vgpus"].as_array().into_iter().flatten();
        all.filter(|one| one["uuid"] == uuid).find_map(|one| one["share_measured"].as_f64())
    };
    for (uuid, got) in busy.iter().zip(got) {
        let measured = measured(uuid).context("A share")?;
        println!("shown {got} %, measured {measured:.1} %");
        assert!((got - measured).abs() < 15.0, "shown {got} %, measured {measured:.1} %");
    }
    page.until(&format!(
        "document.querySelectorAll('[data-uuid=\"{}\"] path').length === 2 && \
         [...document.querySelectorAll('[data-uuid=\"{}\"] path')].every((p) => p.getAttribute('d').length > 40)",
        busy[0], busy[0]
    ))?;
    charts_have_axes(page, &busy[0])?;
    let label = page.eval(&format!(
        "document.querySelector('[data-uuid=\"{}\"] svg').getAttribute('aria-label')",
        busy[0]
    ))?;
    assert!(label.as_str().is_some_and(|text| text.contains("of 60.0 % asked")), "{label}");
    page.until("document.querySelector('#events').innerText.includes('VM attached')")?;
    Ok(())
}

/// The chart's labels stand beside the lines that they name: shares from top to bottom, times from
/// left to right.
fn charts_have_axes(page: &mut Chromium, uuid: &str) -> Result<()> {
    let texts = |of: &str| {
        format!(
            "[...document.querySelectorAll('[data-uuid=\"{uuid}\"] .{of} span')].map((s) => s.textContent)"
        )
    };
    assert_eq!(page.eval(&texts("shares"))?, json!(["100 %", "50 %", "0 %"]));
    assert_eq!(page.eval(&texts("times"))?, json!(["2 min ago", "1 min ago", "now"]));
    let middles = page.eval(&format!(
        "(() => {{ const card = document.querySelector('[data-uuid=\"{uuid}\"]');
            const middle = (e) => {{ const b = e.getBoundingClientRect();
              return [b.x + b.width / 2, b.y + b.height / 2]; }};
            const lines = [...card.querySelectorAll('.chart line')].map(middle);
            const shares = [...card.querySelectorAll('.shares span')].map(middle);
            const minute = middle(card.querySelectorAll('.times span')[1]);
            return [...shares.map((at, index) => at[1] - lines[index][1]), minute[0] - lines[4][0]]; }})()"
    ))?;
    for offset in middles.as_array().context("A list")? {
        let offset = offset.as_f64().context("A number")?;
        assert!(offset.abs() < 4.0, "a label is {offset} pixels beside its line: {middles}");
    }
    Ok(())
}

/// A click opens the screen, and every pixel is as the guest drew it.
fn screen_shows_pixels(page: &mut Chromium, shown: &str, mut guest: Guest) -> Result<()> {
    page.click(&format!("[data-uuid=\"{shown}\"] .thumb"))?;
    page.until("document.querySelector('#screen').open && document.querySelector('#canvas').dataset.updates >= 1")?;
    let size = page.eval(
        "[document.querySelector('#canvas').width, document.querySelector('#canvas').height]",
    )?;
    assert_eq!(size, json!([WIDTH, HEIGHT]));
    for (x, y) in [(0, 0), (799, 599), (150, 350), (401, 77), (50, 599), (640, 481)] {
        let pixel = page.eval(&format!(
            "[...document.querySelector('#canvas').getContext('2d').getImageData({x}, {y}, 1, 1).data].slice(0, 3)"
        ))?;
        let [blue, green, red, _] = colour(x, y);
        assert_eq!(pixel, json!([red, green, blue]), "at {x}, {y}");
    }
    guest.0.region_write(FRAMEBUFFER, (u64::from(WIDTH) * 50 + 50) * 4, &[1, 2, 3, 0])?;
    page.until(
        "document.querySelector('#canvas').getContext('2d').getImageData(50, 50, 1, 1).data.join() === '3,2,1,255'",
    )?;
    Ok(())
}

/// Keys and pointer events reach the VM.
fn input_reaches_the_vm(page: &mut Chromium, keys: &Receiver<Value>) -> Result<()> {
    page.until("document.querySelector('#screen-status').textContent.includes('keyboard')")?;
    page.click("#canvas")?;
    page.key("KeyA", "a")?;
    let (mut pressed, mut clicked) = (false, false);
    while !(pressed && clicked) {
        let events = keys.recv_timeout(TIMEOUT).context("Neither key nor click")?;
        for event in events.as_array().into_iter().flatten() {
            pressed |= event["data"]["key"] == json!({ "type": "number", "data": 0x1e });
            clicked |= event["data"]["button"] == "left";
        }
    }
    Ok(())
}

#[test]
#[ignore = "starts a VNC client: run `cargo lab test`"]
fn the_library_of_virt_manager_sees_the_screen() -> Result<()> {
    let Some(viewers) = viewers() else { return Ok(()) };
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "SOFT-256MQ", "20")?;
    let _guest = Guest::draw(&vgpud, &uuid)?;
    let mut command = Command::new(vgpuctl::path()?);
    command.arg("--socket").arg(vgpud.api_socket());
    command.args(["view", &uuid, "--tcp", "--print", "--output", "json"]);
    let mut view = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(view.stdout.take().context("An output")?).read_line(&mut line)?;
    let says: Value = serde_json::from_str(&line)?;
    let port: u16 =
        says["address"].as_str().and_then(|a| a.rsplit(':').next()).context("A port")?.parse()?;
    let picture = vgpud.run_dir().join("screen.png");
    let mut capture = viewers.gvnccapture();
    // The client counts displays from port 5900.
    capture.arg("--quiet").arg(format!("127.0.0.1:{}", i32::from(port) - 5900)).arg(&picture);
    // The client asks for the password on a terminal.
    let words = std::iter::once(capture.get_program()).chain(capture.get_args());
    let line: Vec<_> = words.map(|word| format!("'{}'", word.to_string_lossy())).collect();
    let mut terminal = Command::new("script");
    terminal.args(["-qec", &line.join(" "), "/dev/null"]);
    terminal.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut capture = terminal.spawn()?;
    let (mut asked, mut said) = ([0], Vec::new());
    let mut output = capture.stdout.take().context("An output")?;
    while !said.ends_with(b"Password:") {
        output
            .read_exact(&mut asked)
            .with_context(|| String::from_utf8_lossy(&said).into_owned())?;
        said.extend(asked);
    }
    let password = says["password"].as_str().context("A password")?;
    let mut input = capture.stdin.take().context("An input")?;
    // After the prompt the client changes the terminal's settings, which drops earlier input.
    let deadline = Instant::now() + TIMEOUT;
    while capture.try_wait()?.is_none() {
        if Instant::now() > deadline {
            capture.kill()?;
        }
        let _ = input.write_all(format!("{password}\n").as_bytes());
        std::thread::sleep(Duration::from_millis(250));
    }
    let mut rest = Vec::new();
    output.read_to_end(&mut rest)?;
    let done = capture.wait_with_output()?;
    kill_process(view.id(), Signal::SIGTERM)?;
    view.wait()?;
    let rest = String::from_utf8_lossy(&rest);
    ensure!(done.status.success() && picture.exists(), "{done:?}: {rest}");
    let mut reader = png::Decoder::new(BufReader::new(fs::File::open(picture)?)).read_info()?;
    let mut pixels = vec![0; reader.output_buffer_size().context("A size")?];
    let info = reader.next_frame(&mut pixels)?;
    assert_eq!((info.width, info.height), (WIDTH.into(), HEIGHT.into()));
    let bytes = info.color_type.samples();
    for (at, pixel) in (0_u32..).zip(pixels.chunks_exact(bytes)) {
        let (x, y) = ((at % u32::from(WIDTH)) as u16, (at / u32::from(WIDTH)) as u16);
        let [blue, green, red, _] = colour(x, y);
        assert_eq!(pixel[..3], [red, green, blue], "at {x}, {y}");
    }
    Ok(())
}
