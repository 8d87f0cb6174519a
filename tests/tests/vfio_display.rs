//! A display adapter shared by vGPUs: QEMU's VGA, through VFIO, in a VM that is a host. Who is on its screen is seen from
//! outside of that VM, where the screen is. Beside it is one without VGA, QEMU's bochs-display.
//!
//! The test boots a VM and runs itself inside it: `cargo lab test` and `cargo test --test vfio_display -- --ignored` do.

#![allow(clippy::unwrap_used)]

mod nested;

use std::fs;
use std::thread;
use std::time::Duration;

use lab::picture::Picture;
use lab::qemu::Vm;
use mdev_core::units::MIB;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::{Vgpud, kill_process, wait_for};

use nested::head::Head;
use nested::{DISPLAY, Nested, ok};

/// The adapter without VGA, which has 32 MiB.
const PLAIN: &str = "0000:00:04.0";
const FIRST: &str = "11111111-1111-4111-8111-111111111111";
const SECOND: &str = "22222222-2222-4222-8222-222222222222";
const THIRD: &str = "33333333-3333-4333-8333-333333333333";
const FOURTH: &str = "44444444-4444-4444-8444-444444444444";
/// Those of guests, by number: two on the adapter with VGA, one on the other.
const GUESTS: [&str; 3] = [FIRST, SECOND, FOURTH];
const RED: u32 = 0x00c0_4020;
const BLUE: u32 = 0x0020_40c0;
const GREEN: u32 = 0x0030_c050;
const BLACK: u32 = 0;
/// A frame at 60 Hz, and what an emulator on a busy machine may take besides.
const FRAME_US: u64 = 16_000;

/// Where the two runs of the test meet, inside.
const ASKED: &str = "/tmp/asked";
const ANSWER: &str = "/tmp/answer";

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn one_vgpu_at_a_time_is_on_the_physical_screen() {
    if nested::is_inside() {
        return serve_guests();
    }
    let plain =
        json!({ "driver": "bochs-display", "id": "plain", "addr": "0x4", "vgamem": 32 * MIB });
    let mut host = Nested::boot_beside(vec![plain]);
    ok(&mut host.vm, &format!("vgpuctl parents bind {PLAIN}"));
    host.start("one_vgpu_at_a_time_is_on_the_physical_screen", "/tmp/log");
    let socket = ask(&mut host.vm, "socket");
    let vgpuctl = format!("vgpuctl --socket {socket}");

    // The first is seen, and nothing of the second.
    ask(&mut host.vm, &format!("draw 0 640 480 {RED}"));
    ask(&mut host.vm, &format!("draw 1 800 600 {BLUE}"));
    assert_eq!(screen(&mut host), (640, 480, RED));
    let line = format!("{DISPLAY} {FIRST}\n");
    assert_eq!(ok(&mut host.vm, &format!("{vgpuctl} focus -p {DISPLAY}")), line);

    // Back and forth, each time in less than a frame.
    let mut took = Vec::new();
    for (uuid, picture) in [(SECOND, (800, 600, BLUE)), (FIRST, (640, 480, RED))].repeat(5) {
        let focused = focus(&mut host.vm, &vgpuctl, uuid);
        assert_eq!((&focused["parent"], &focused["focus"]), (&json!(DISPLAY), &json!(uuid)));
        took.push(focused["switch_us"].as_u64().unwrap());
        assert_eq!(screen(&mut host), picture);
    }
    took.sort_unstable();
    println!("a switch took {} us, {} at most", took[took.len() / 2], took[took.len() - 1]);
    assert!(took[took.len() / 2] < FRAME_US, "{took:?}");

    // The screen follows the guest that is on it, and no other.
    ask(&mut host.vm, &format!("draw 1 1024 768 {GREEN}"));
    assert_eq!(screen(&mut host), (640, 480, RED));
    ask(&mut host.vm, &format!("draw 0 1280 800 {RED}"));
    assert_eq!(screen(&mut host), (1280, 800, RED));
    ask(&mut host.vm, "off 0");
    assert_eq!(screen(&mut host).2, BLACK);
    ask(&mut host.vm, &format!("draw 0 640 480 {RED}"));
    assert_eq!(screen(&mut host), (640, 480, RED));
    let list = ok(&mut host.vm, &format!("{vgpuctl} list"));
    assert!(
        list.contains(&format!("{FIRST} {DISPLAY} BOCHS-8MQ manual (on the screen)\n")),
        "{list}"
    );
    assert!(list.contains(&format!("{SECOND} {DISPLAY} BOCHS-8MQ manual\n")), "{list}");

    // The manager is no part of it: it dies, and the next one finds the screen as it was.
    focus(&mut host.vm, &vgpuctl, SECOND);
    ask(&mut host.vm, "manager");
    assert_eq!(screen(&mut host), (1024, 768, GREEN));
    assert_eq!(
        ok(&mut host.vm, &format!("{vgpuctl} focus -p {DISPLAY}")),
        format!("{DISPLAY} {SECOND}\n")
    );

    // A worker dies under its VM: there is no room for another one's memory, but its own is still there.
    ask(&mut host.vm, "crash 1");
    ask(&mut host.vm, &format!("draw 1 1024 768 {GREEN}"));
    focus(&mut host.vm, &vgpuctl, SECOND);
    assert_eq!(screen(&mut host), (1024, 768, GREEN));

    // In turn, until one is asked for.
    ok(&mut host.vm, &format!("{vgpuctl} focus --rotate 1 -p {DISPLAY}"));
    for picture in [(640, 480, RED), (1024, 768, GREEN), (640, 480, RED)] {
        wait_for("the next one's turn", || screen(&mut host) == picture).unwrap();
    }
    let turns = ok(&mut host.vm, &format!("{vgpuctl} focus -p {DISPLAY}"));
    assert!(turns.ends_with(" (in turn, 1 s each)\n"), "{turns}");
    focus(&mut host.vm, &vgpuctl, FIRST);
    let turns = ok(&mut host.vm, &format!("{vgpuctl} focus -p {DISPLAY}"));
    assert_eq!(turns, format!("{DISPLAY} {FIRST}\n"));
    let text =
        nested::refused(&mut host.vm, &format!("{vgpuctl} focus --rotate 100000 -p {DISPLAY}"));
    assert!(text.contains("Each vGPU is shown for 1 to 86400 seconds"), "{text}");

    // Without VGA a screen cannot be switched off: it shows black memory of nobody's.
    assert_eq!(screen_of(&mut host, "plain"), (640, 400, BLACK));
    ask(&mut host.vm, &format!("draw 2 800 600 {BLUE}"));
    assert_eq!(screen_of(&mut host, "plain"), (800, 600, BLUE));
    ask(&mut host.vm, "off 2");
    assert_eq!(screen_of(&mut host, "plain"), (640, 400, BLACK));
    ask(&mut host.vm, &format!("draw 2 1024 768 {RED}"));
    assert_eq!(screen_of(&mut host, "plain"), (1024, 768, RED));
    ok(&mut host.vm, &format!("{vgpuctl} stop --force -u {FOURTH}"));
    assert_eq!(screen_of(&mut host, "plain"), (640, 400, BLACK));

    // Who stops is followed by the next, and the last by darkness.
    ok(&mut host.vm, &format!("{vgpuctl} stop --force -u {FIRST}"));
    assert_eq!(screen(&mut host), (1024, 768, GREEN));
    ask(&mut host.vm, "memory");
    ok(&mut host.vm, &format!("{vgpuctl} stop --force -u {SECOND}"));
    assert_eq!(screen(&mut host).2, BLACK);
    assert_eq!(
        ok(&mut host.vm, &format!("{vgpuctl} focus -p {DISPLAY}")),
        format!("{DISPLAY} nobody\n")
    );
    ask(&mut host.vm, "end");
    // Nobody has it any more: its driver takes it back, and shows what it likes.
    let text = ok(&mut host.vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    assert_eq!(text, format!("{DISPLAY} is back with bochs-drm\n"));
    assert_eq!(host.faults(), 0);
    host.vm.quit().unwrap();
}

/// Tells the run inside to do something, and waits until it is done.
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

/// What the adapter's screen shows, as long as it is of one colour.
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

/// A `vgpud` inside, with vGPUs and their guests, who do what they are asked to.
fn serve_guests() {
    let [display, plain] = [DISPLAY, PLAIN].map(|address| format!("vfio:{address}"));
    let mut vgpud = Vgpud::start_with(&["--parent", &display, "--parent", &plain]).unwrap();
    wait_for("the parents are ready", || {
        let ready = |all: &Value| (0..2).all(|n| all[n]["state"] == "ready");
        vgpud.get("/v1/parents").is_ok_and(|all| ready(&all))
    })
    .unwrap();
    // Of the other one's 32 MiB, 1 MiB is black.
    assert_eq!(vgpud.get("/v1/parents").unwrap()[1]["vram_bytes"], 31 * MIB);
    let types = vgpud.get("/v1/types").unwrap()[0]["types"].clone();
    let names: Vec<_> = types.as_array().unwrap().iter().map(|one| one["name"].clone()).collect();
    assert_eq!(names, ["BOCHS-4MQ", "BOCHS-8MQ", "BOCHS-16MQ"]);
    let request = |uuid: &str| {
        let parent = if uuid == FOURTH { PLAIN } else { DISPLAY };
        json!({ "uuid": uuid, "parent": parent, "mdev_type": "BOCHS-8MQ", "run": true })
    };
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
                let (guest, colour) = (number(1) as usize, number(4));
                colours[guest] = colour;
                let (width, height) = (number(2) as u16, number(3) as u16);
                guests[guest].as_mut().unwrap().draw(width, height, colour);
                // Each sees its own pixels and none of the other's, and nobody was told of any of them.
                for (guest, colour) in guests.iter().flatten().zip(colours) {
                    assert!(guest.is_all(colour));
                }
                let stats = vgpud.get("/v1/stats").unwrap();
                for vgpu in stats["vgpus"].as_array().unwrap() {
                    assert_eq!(vgpu["traps"]["memory"], 0, "{vgpu}");
                    assert_eq!(vgpu["traps"]["doorbell"], 0, "{vgpu}");
                }
                // The vGPU's own picture is the same, whether or not it is on the screen.
                assert_eq!(picture(&vgpud, GUESTS[guest]), (number(2), number(3), colour));
            }
            "off" => {
                let guest = guests[number(1) as usize].as_mut().unwrap();
                guest.client.region_write(2, 0x508, &[0, 0]).unwrap();
            }
            "crash" => {
                let guest = number(1) as usize;
                let pid = |vgpud: &Vgpud| vgpud.show(GUESTS[guest]).unwrap()["pid"].as_u64();
                let worker = pid(&vgpud).unwrap();
                kill_process(u32::try_from(worker).unwrap(), Signal::SIGKILL).unwrap();
                wait_for("a fresh worker", || {
                    let vgpu = vgpud.show(GUESTS[guest]).unwrap();
                    pid(&vgpud).is_some_and(|now| now != worker) && vgpu["state"] == "running"
                })
                .unwrap();
                // The VM still has the same memory, in which nothing is left; its next start comes back to it.
                let before = guests[guest].take().unwrap();
                assert!(before.is_all(BLACK));
                let now = Head::attach(&vgpud.vfio_socket(GUESTS[guest]));
                assert_eq!(now.offset, before.offset);
                colours[guest] = BLACK;
                guests[guest] = Some(now);
            }
            "manager" => {
                vgpud.end(Signal::SIGKILL).unwrap();
                vgpud.start_again().unwrap();
                let shown = vgpud.show(SECOND).unwrap();
                assert_eq!((&shown["state"], &shown["focus"]), (&json!("running"), &json!(true)));
            }
            "memory" => {
                // The first is stopped, and its VM still has its memory: nobody else gets it, until the VM is gone too.
                let old = guests[0].take().unwrap();
                assert!(old.is_all(BLACK), "what it drew is gone");
                let refused = vgpud.refused("POST", "/v1/vgpus", Some(&request(THIRD))).unwrap();
                assert_eq!((refused.0, refused.1.as_str()), (409, "no_room"), "{}", refused.2);
                let said = "No 8 MiB of video memory are free in one piece: VMs that are still there have 8 MiB of \
                            vGPUs that were stopped under them; shut these VMs down";
                assert_eq!(refused.2, said);
                // The same vGPU neither: whoever starts it may have another VM in mind.
                let again = vgpud.refused("POST", "/v1/vgpus", Some(&request(FIRST))).unwrap();
                assert_eq!(again.2, said);
                drop(old);
                vgpud.create(&request(THIRD)).unwrap();
                let third = Head::attach(&vgpud.vfio_socket(THIRD));
                assert!(third.offset == 0 && third.is_all(BLACK));
                drop(third);
                vgpud.call("POST", &format!("/v1/vgpus/{THIRD}/stop"), None).unwrap();
                assert!(guests[1].as_ref().unwrap().is_all(GREEN), "its neighbour's is as it was");
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

fn answer(text: &str) {
    let new = format!("{ANSWER}.new");
    fs::write(&new, format!("done {text}\n")).unwrap();
    fs::rename(new, ANSWER).unwrap();
}

/// A vGPU's screenshot, as long as it is of one colour.
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
