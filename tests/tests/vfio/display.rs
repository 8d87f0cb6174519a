//! A display adapter shared by vGPUs: QEMU's VGA through VFIO, in a VM that is the host. The test
//! sees the screen from outside of the VM. A second adapter without VGA is QEMU's bochs-display.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::thread;
use std::time::Duration;

use lab::picture::Picture;
use lab::qemu::Vm;
use mdev_core::units::MIB;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::{Vgpud, kill_process, wait_for};

use crate::nested::head::Head;
use crate::nested::{self, DISPLAY, Nested, ok};

/// The adapter without VGA, with 32 MiB.
const PLAIN: &str = "0000:00:04.0";
const FIRST: &str = "11111111-1111-4111-8111-111111111111";
const SECOND: &str = "22222222-2222-4222-8222-222222222222";
const THIRD: &str = "33333333-3333-4333-8333-333333333333";
const FOURTH: &str = "44444444-4444-4444-8444-444444444444";
/// vGPUs with guests, by number: two on the adapter with VGA, one on the other.
const GUESTS: [&str; 3] = [FIRST, SECOND, FOURTH];
const RED: u32 = 0x00c0_4020;
const BLUE: u32 = 0x0020_40c0;
const GREEN: u32 = 0x0030_c050;
const BLACK: u32 = 0;
/// A frame at 60 Hz, the limit of a screen switch.
const FRAME_US: u64 = 16_000;

/// Files for requests from the test outside to the test inside, and for answers.
const ASKED: &str = "/tmp/asked";
const ANSWER: &str = "/tmp/answer";

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn the_physical_screen_shows_one_vgpu_at_a_time() {
    if nested::is_inside() {
        return serve_guests();
    }
    let plain =
        json!({ "driver": "bochs-display", "id": "plain", "addr": "0x4", "vgamem": 32 * MIB });
    let mut host = Nested::boot_beside(vec![plain]);
    ok(&mut host.vm, &format!("vgpuctl parents bind {PLAIN}"));
    host.start("/tmp/log");
    let socket = ask(&mut host.vm, "socket");
    let vgpuctl = format!("vgpuctl --socket {socket}");

    shows_the_focused_vgpu(&mut host, &vgpuctl);
    survives_crashes_and_rotates(&mut host, &vgpuctl);
    without_vga(&mut host, &vgpuctl);

    // After the focused vGPU stops, the next one is shown, and after the last one darkness.
    ok(&mut host.vm, &format!("{vgpuctl} stop --force -u {FIRST}"));
    assert_eq!(screen(&mut host), (1024, 768, GREEN));
    ask(&mut host.vm, "memory");
    ok(&mut host.vm, &format!("{vgpuctl} stop --force -u {SECOND}"));
    assert_eq!(screen(&mut host).2, BLACK);
    assert_eq!(
        ok(&mut host.vm, &format!("{vgpuctl} focus -p {DISPLAY}")),
        format!("{DISPLAY} none\n")
    );
    ask(&mut host.vm, "end");
    // The adapter is unused: the kernel's driver gets it back.
    let text = ok(&mut host.vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    assert_eq!(text, format!("{DISPLAY} is returned to bochs-drm\n"));
    assert_eq!(host.faults(), 0);
    host.vm.quit().unwrap();
}

/// The screen shows the focused vGPU and follows its drawing.
fn shows_the_focused_vgpu(host: &mut Nested, vgpuctl: &str) {
    // The first vGPU is visible and the second is not.
    ask(&mut host.vm, &format!("draw 0 640 480 {RED}"));
    ask(&mut host.vm, &format!("draw 1 800 600 {BLUE}"));
    assert_eq!(screen(host), (640, 480, RED));
    let line = format!("{DISPLAY} {FIRST}\n");
    assert_eq!(ok(&mut host.vm, &format!("{vgpuctl} focus -p {DISPLAY}")), line);

    // Switches back and forth, each in less than a frame.
    let mut took = Vec::new();
    for (uuid, picture) in [(SECOND, (800, 600, BLUE)), (FIRST, (640, 480, RED))].repeat(5) {
        let focused = focus(&mut host.vm, vgpuctl, uuid);
        assert_eq!((&focused["parent"], &focused["focus"]), (&json!(DISPLAY), &json!(uuid)));
        took.push(focused["switch_us"].as_u64().unwrap());
        assert_eq!(screen(host), picture);
    }
    took.sort_unstable();
    println!("a switch took {} us, {} at most", took[took.len() / 2], took[took.len() - 1]);
    assert!(took[took.len() / 2] < FRAME_US, "{took:?}");

    // The screen shows changes of the focused guest only.
    ask(&mut host.vm, &format!("draw 1 1024 768 {GREEN}"));
    assert_eq!(screen(host), (640, 480, RED));
    ask(&mut host.vm, &format!("draw 0 1280 800 {RED}"));
    assert_eq!(screen(host), (1280, 800, RED));
    ask(&mut host.vm, "off 0");
    assert_eq!(screen(host).2, BLACK);
    ask(&mut host.vm, &format!("draw 0 640 480 {RED}"));
    assert_eq!(screen(host), (640, 480, RED));
    let list = ok(&mut host.vm, &format!("{vgpuctl} list"));
    assert!(
        list.contains(&format!("{FIRST} {DISPLAY} BOCHS-8MQ manual (on the screen)\n")),
        "{list}"
    );
    assert!(list.contains(&format!("{SECOND} {DISPLAY} BOCHS-8MQ manual\n")), "{list}");
}

/// Crashes do not change the screen; rotation does.
fn survives_crashes_and_rotates(host: &mut Nested, vgpuctl: &str) {
    // The manager dies, and the next manager finds the screen unchanged.
    focus(&mut host.vm, vgpuctl, SECOND);
    ask(&mut host.vm, "manager");
    assert_eq!(screen(host), (1024, 768, GREEN));
    assert_eq!(
        ok(&mut host.vm, &format!("{vgpuctl} focus -p {DISPLAY}")),
        format!("{DISPLAY} {SECOND}\n")
    );

    // An anchor dies under its VM: there is no room for another vGPU's memory, but the vGPU keeps
    // its own.
    ask(&mut host.vm, "crash 1");
    ask(&mut host.vm, &format!("draw 1 1024 768 {GREEN}"));
    focus(&mut host.vm, vgpuctl, SECOND);
    assert_eq!(screen(host), (1024, 768, GREEN));

    // Rotation, until a vGPU is focused.
    ok(&mut host.vm, &format!("{vgpuctl} focus --rotate 1 -p {DISPLAY}"));
    for picture in [(640, 480, RED), (1024, 768, GREEN), (640, 480, RED)] {
        wait_for("rotation to the next vGPU", || screen(host) == picture).unwrap();
    }
    let turns = ok(&mut host.vm, &format!("{vgpuctl} focus -p {DISPLAY}"));
    assert!(turns.ends_with(" (rotates every 1 s)\n"), "{turns}");
    focus(&mut host.vm, vgpuctl, FIRST);
    let turns = ok(&mut host.vm, &format!("{vgpuctl} focus -p {DISPLAY}"));
    assert_eq!(turns, format!("{DISPLAY} {FIRST}\n"));
    let text =
        nested::refused(&mut host.vm, &format!("{vgpuctl} focus --rotate 100000 -p {DISPLAY}"));
    assert!(text.contains("Each vGPU is shown for 1 to 86400 seconds"), "{text}");
}

/// The adapter without VGA shows black memory instead of switching off.
fn without_vga(host: &mut Nested, vgpuctl: &str) {
    // Without VGA a screen cannot be switched off: it shows black memory outside all partitions.
    assert_eq!(screen_of(host, "plain"), (640, 400, BLACK));
    ask(&mut host.vm, &format!("draw 2 800 600 {BLUE}"));
    assert_eq!(screen_of(host, "plain"), (800, 600, BLUE));
    ask(&mut host.vm, "off 2");
    assert_eq!(screen_of(host, "plain"), (640, 400, BLACK));
    ask(&mut host.vm, &format!("draw 2 1024 768 {RED}"));
    assert_eq!(screen_of(host, "plain"), (1024, 768, RED));
    ok(&mut host.vm, &format!("{vgpuctl} stop --force -u {FOURTH}"));
    assert_eq!(screen_of(host, "plain"), (640, 400, BLACK));
}

/// Sends a request to the run inside and waits for its answer.
fn ask(vm: &mut Vm, what: &str) -> String {
    let wait = format!(
        "rm -f {ANSWER}; echo '{what}' > {ASKED}.new && mv {ASKED}.new {ASKED}; \
         n=0; until [ -e {ANSWER} ]; do n=$((n+1)); [ $n -lt 600 ] || break; usleep 50000; done; \
         cat {ANSWER} || tail -n 40 /tmp/log"
    );
    let answer = ok(vm, &wait);
    let done = answer.strip_prefix("done ");
    done.unwrap_or_else(|| panic!("{what}: {answer}")).trim().to_owned()
}

fn focus(vm: &mut Vm, vgpuctl: &str, uuid: &str) -> Value {
    let text = ok(vm, &format!("{vgpuctl} focus {uuid} --output json"));
    serde_json::from_str(&text).unwrap()
}

/// Returns size and colour of the adapter's screen, if it has one colour.
fn screen(host: &mut Nested) -> (usize, usize, u32) {
    screen_of(host, "display")
}

fn screen_of(host: &mut Nested, device: &str) -> (usize, usize, u32) {
    let file = host.folder.path().join("screen.png");
    let name = file.to_string_lossy();
    let arguments = json!({ "device": device, "head": 0, "filename": name, "format": "png" });
    host.vm.qmp.execute("screendump", &arguments).unwrap();
    let picture = Picture::read(&file).unwrap();
    let colour = [RED, BLUE, GREEN, BLACK].into_iter().find(|colour| picture.is_all(*colour));
    (picture.width, picture.height, colour.unwrap_or(u32::MAX))
}

/// Runs a `vgpud` inside, with vGPUs and guests that follow requests.
fn serve_guests() {
    let [display, plain] = [DISPLAY, PLAIN].map(|address| format!("vfio:{address}"));
    let mut vgpud = Vgpud::start_with(&["--parent", &display, "--parent", &plain]).unwrap();
    wait_for("the parents are ready", || {
        let ready = |all: &Value| (0..2).all(|n| all[n]["state"] == "ready");
        vgpud.get("/v1/parents").is_ok_and(|all| ready(&all))
    })
    .unwrap();
    // 1 MiB of the other adapter's 32 MiB is the black memory.
    assert_eq!(vgpud.get("/v1/parents").unwrap()[1]["vram_bytes"], 31 * MIB);
    let types = vgpud.get("/v1/types").unwrap()[0]["types"].clone();
    let names: Vec<_> = types.as_array().unwrap().iter().map(|one| one["name"].clone()).collect();
    assert_eq!(names, ["BOCHS-4MQ", "BOCHS-8MQ", "BOCHS-16MQ"]);
    let mut guests = Vec::new();
    for uuid in GUESTS {
        vgpud.create(&request(uuid)).unwrap();
        guests.push(Some(Head::attach(&vgpud.vfio_socket(uuid))));
    }
    let offsets: Vec<_> = guests.iter().flatten().map(|guest| guest.offset).collect();
    assert_eq!(offsets, [0, 8 * MIB, 0]);
    let mut colours = [BLACK; 3];
    loop {
        while !fs::exists(ASKED).unwrap() {
            thread::sleep(Duration::from_millis(5));
        }
        let asked = fs::read_to_string(ASKED).unwrap();
        fs::remove_file(ASKED).unwrap();
        let words: Vec<_> = asked.split_whitespace().collect();
        let number = |place: usize| words[place].parse::<u32>().unwrap();
        let mut told = String::new();
        match words[0] {
            "socket" => told = vgpud.api_socket().to_string_lossy().into_owned(),
            "draw" => {
                let guest = number(1) as usize;
                colours[guest] = number(4);
                draw(&vgpud, &mut guests, colours, guest, (number(2), number(3)));
            }
            "off" => {
                let guest = guests[number(1) as usize].as_mut().unwrap();
                guest.client.region_write(2, 0x508, &[0, 0]).unwrap();
            }
            "crash" => {
                let guest = number(1) as usize;
                crash(&vgpud, GUESTS[guest], &mut guests[guest]);
                colours[guest] = BLACK;
            }
            "manager" => {
                vgpud.end(Signal::SIGKILL).unwrap();
                vgpud.start_again().unwrap();
                let shown = vgpud.show(SECOND).unwrap();
                assert_eq!((&shown["state"], &shown["focus"]), (&json!("running"), &json!(true)));
            }
            "memory" => {
                reserves_memory_of_stopped_vgpus(&vgpud, guests[0].take().unwrap());
                let second = guests[1].as_ref().unwrap();
                assert!(second.is_all(GREEN), "the other vGPU's memory is unchanged");
            }
            "end" => {
                drop((guests, vgpud));
                return answer("");
            }
            other => panic!("{other}?"),
        }
        answer(&told);
    }
}

/// Returns the request that starts a vGPU.
fn request(uuid: &str) -> Value {
    let parent = if uuid == FOURTH { PLAIN } else { DISPLAY };
    json!({ "uuid": uuid, "parent": parent, "mdev_type": "BOCHS-8MQ", "run": true })
}

/// Lets a guest draw. `colours` are those of all guests then.
fn draw(
    vgpud: &Vgpud,
    guests: &mut [Option<Head>],
    colours: [u32; 3],
    guest: usize,
    (width, height): (u32, u32),
) {
    guests[guest].as_mut().unwrap().draw(width as u16, height as u16, colours[guest]);
    // Each guest sees only its own pixels, and no access to pixels was trapped.
    for (guest, colour) in guests.iter().flatten().zip(colours) {
        assert!(guest.is_all(colour));
    }
    let stats = vgpud.get("/v1/stats").unwrap();
    for vgpu in stats["vgpus"].as_array().unwrap() {
        assert_eq!(vgpu["traps"]["memory"], 0, "{vgpu}");
        assert_eq!(vgpu["traps"]["doorbell"], 0, "{vgpu}");
    }
    // The vGPU's own picture does not depend on the focus.
    assert_eq!(picture(vgpud, GUESTS[guest]), (width, height, colours[guest]));
}

/// Kills an anchor, and with it a worker, under its VM, and lets the VM attach again.
fn crash(vgpud: &Vgpud, uuid: &str, guest: &mut Option<Head>) {
    let pid = || vgpud.show(uuid).unwrap()["pid"].as_u64();
    let worker = pid().unwrap();
    kill_process(vgpud.anchor(uuid).unwrap(), Signal::SIGKILL).unwrap();
    wait_for("a new worker", || {
        let vgpu = vgpud.show(uuid).unwrap();
        pid().is_some_and(|now| now != worker) && vgpu["state"] == "running"
    })
    .unwrap();
    // The VM keeps the same memory, which was cleared; the vGPU's next start uses it again.
    let before = guest.take().unwrap();
    assert!(before.is_all(BLACK));
    let now = Head::attach(&vgpud.vfio_socket(uuid));
    assert_eq!(now.offset, before.offset);
    *guest = Some(now);
}

/// The first vGPU has stopped while its VM still maps the memory: the memory stays reserved until
/// the VM ends.
fn reserves_memory_of_stopped_vgpus(vgpud: &Vgpud, old: Head) {
    assert!(old.is_all(BLACK), "its memory is cleared");
    let refused = vgpud.refused("POST", "/v1/vgpus", Some(&request(THIRD))).unwrap();
    assert_eq!((refused.0, refused.1.as_str()), (409, "no_room"), "{}", refused.2);
    let said = "No contiguous 8 MiB of video memory are free: VMs still map 8 MiB of stopped vGPUs; \
                shut these VMs down";
    assert_eq!(refused.2, said);
    // The same vGPU does not get the memory back either, since another VM may use it now.
    let again = vgpud.refused("POST", "/v1/vgpus", Some(&request(FIRST))).unwrap();
    assert_eq!(again.2, said);
    drop(old);
    vgpud.create(&request(THIRD)).unwrap();
    let third = Head::attach(&vgpud.vfio_socket(THIRD));
    assert!(third.offset == 0 && third.is_all(BLACK));
    drop(third);
    vgpud.call("POST", &format!("/v1/vgpus/{THIRD}/stop"), None).unwrap();
}

fn answer(text: &str) {
    let new = format!("{ANSWER}.new");
    fs::write(&new, format!("done {text}\n")).unwrap();
    fs::rename(new, ANSWER).unwrap();
}

/// Returns the colour of a vGPU's screenshot, if it has one colour.
fn picture(vgpud: &Vgpud, uuid: &str) -> (u32, u32, u32) {
    let (status, png) =
        vgpud.request("GET", &format!("/v1/vgpus/{uuid}/screenshot"), None).unwrap();
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&png));
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), png).unwrap();
    let picture = Picture::read(file.path()).unwrap();
    let colour = [RED, BLUE, GREEN].into_iter().find(|colour| picture.is_all(*colour));
    (picture.width as u32, picture.height as u32, colour.unwrap_or(u32::MAX))
}
