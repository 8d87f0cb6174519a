//! A display adapter shared by vGPUs: QEMU's VGA, through VFIO, in a VM that is a host. Who is on its screen is seen from
//! outside of that VM, where the screen is.
//!
//! The test boots a VM and runs itself inside it: `cargo lab test` and `cargo test --test vfio_display -- --ignored` do.

#![allow(clippy::unwrap_used)]
#![allow(
    clippy::cast_ptr_alignment,
    reason = "mappings begin with pages, and their lengths are whole words"
)]

mod nested;

use std::fs;
use std::thread;
use std::time::Duration;

use lab::picture::Picture;
use lab::qemu::Vm;
use mdev_core::units::MIB;
use memmap2::{MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::{Vgpud, wait_for};
use vfio_user::Client;

use nested::{DISPLAY, Nested, ok};

const FIRST: &str = "11111111-1111-4111-8111-111111111111";
const SECOND: &str = "22222222-2222-4222-8222-222222222222";
const THIRD: &str = "33333333-3333-4333-8333-333333333333";
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
    let mut host = Nested::boot();
    host.start("one_vgpu_at_a_time_is_on_the_physical_screen", "/tmp/log");
    let socket = ask(&mut host.vm, "socket");
    let vgpuctl = format!("vgpuctl --socket {socket}");

    // The first is seen, and nothing of the second.
    ask(&mut host.vm, &format!("draw 0 640 480 {RED}"));
    ask(&mut host.vm, &format!("draw 1 800 600 {BLUE}"));
    assert_eq!(screen(&mut host), (640, 480, RED));
    let line = format!("{DISPLAY} {FIRST}\n");
    assert_eq!(ok(&mut host.vm, &format!("{vgpuctl} focus")), line);

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
    assert_eq!(ok(&mut host.vm, &format!("{vgpuctl} focus")), format!("{DISPLAY} {SECOND}\n"));

    // In turn, until one is asked for.
    ok(&mut host.vm, &format!("{vgpuctl} focus --rotate 1"));
    for picture in [(640, 480, RED), (1024, 768, GREEN), (640, 480, RED)] {
        wait_for("the next one's turn", || screen(&mut host) == picture).unwrap();
    }
    let turns = ok(&mut host.vm, &format!("{vgpuctl} focus"));
    assert!(turns.ends_with(" (in turn, 1 s each)\n"), "{turns}");
    focus(&mut host.vm, &vgpuctl, FIRST);
    let turns = ok(&mut host.vm, &format!("{vgpuctl} focus"));
    assert_eq!(turns, format!("{DISPLAY} {FIRST}\n"));
    let text = nested::refused(&mut host.vm, &format!("{vgpuctl} focus --rotate 100000"));
    assert!(text.contains("Each vGPU is shown for 1 to 86400 seconds"), "{text}");

    // Who stops is followed by the next, and the last by darkness.
    ok(&mut host.vm, &format!("{vgpuctl} stop --force -u {FIRST}"));
    assert_eq!(screen(&mut host), (1024, 768, GREEN));
    ask(&mut host.vm, "memory");
    ok(&mut host.vm, &format!("{vgpuctl} stop --force -u {SECOND}"));
    assert_eq!(screen(&mut host).2, BLACK);
    assert_eq!(ok(&mut host.vm, &format!("{vgpuctl} focus")), format!("{DISPLAY} nobody\n"));
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
    let file = host.folder.path().join("screen.png");
    let name = file.to_string_lossy();
    let arguments = json!({ "device": "display", "head": 0, "filename": name, "format": "png" });
    host.vm.qmp.execute("screendump", &arguments).unwrap();
    let picture = Picture::read(&file).unwrap();
    let colour = [RED, BLUE, GREEN, BLACK].into_iter().find(|colour| picture.is_all(*colour));
    (picture.width, picture.height, colour.unwrap_or(u32::MAX))
}

/// One guest: its registers by messages, its pixels by stores.
struct Guest {
    client: Client,
    memory: MmapRaw,
    offset: u64,
}

impl Guest {
    fn attach(vgpud: &Vgpud, uuid: &str) -> Self {
        let mut client = Client::new(&vgpud.vfio_socket(uuid)).unwrap();
        // Memory space, as firmware would enable it.
        client.region_write(7, 4, &[2, 0]).unwrap();
        let region = client.region(0).unwrap();
        assert_eq!(region.size, 8 * MIB);
        let file = region.file_offset.as_ref().unwrap();
        let offset = file.start();
        // The crate leaves it open for programs that are started later, of which the next manager is one.
        fcntl(file.file(), FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).unwrap();
        let memory = MmapOptions::new()
            .offset(offset)
            .len(region.size as usize)
            .map_raw(file.file())
            .unwrap();
        // Its framebuffer is all that may be mapped: no register is.
        let mapped = |index| client.region(index).is_some_and(|it| it.file_offset.is_some());
        assert_eq!((1..9).find(|index| mapped(*index)), None);
        Self { client, memory, offset }
    }

    /// Sets a mode as bochs-drm does, and fills all of its memory with a colour.
    fn draw(&mut self, width: u16, height: u16, colour: u32) {
        self.client.region_read(2, 0x41a, &mut [0]).unwrap();
        self.client.region_write(2, 0x400, &[0x20]).unwrap();
        for (register, value) in
            [(0x508, 0), (0x506, 32), (0x502, width), (0x504, height), (0x508, 0x41)]
        {
            self.client.region_write(2, register, &value.to_le_bytes()).unwrap();
        }
        for place in 0..self.pixels() {
            // SAFETY: the place is in the mapping, which nobody in this process has a reference into.
            unsafe { self.memory.as_mut_ptr().cast::<u32>().add(place).write_volatile(colour) };
        }
    }

    fn pixels(&self) -> usize {
        self.memory.len() / 4
    }

    /// Whether all of its memory has one colour.
    fn is_all(&self, colour: u32) -> bool {
        // SAFETY: as above.
        let at = |place| unsafe { self.memory.as_ptr().cast::<u32>().add(place).read_volatile() };
        (0..self.pixels()).all(|place| at(place) == colour)
    }
}

/// A `vgpud` inside, with two vGPUs and their guests, who do what they are asked to.
fn serve_guests() {
    let parent = format!("vfio:{DISPLAY}");
    let mut vgpud = Vgpud::start_with(&["--parent", &parent]).unwrap();
    wait_for("the parent is ready", || {
        vgpud.get("/v1/parents").is_ok_and(|all| all[0]["state"] == "ready")
    })
    .unwrap();
    let types = vgpud.get("/v1/types").unwrap()[0]["types"].clone();
    let names: Vec<_> = types.as_array().unwrap().iter().map(|one| one["name"].clone()).collect();
    assert_eq!(names, ["BOCHS-4MQ", "BOCHS-8MQ", "BOCHS-16MQ"]);
    let request = |uuid: &str| json!({ "uuid": uuid, "mdev_type": "BOCHS-8MQ", "run": true });
    let mut guests = Vec::new();
    for uuid in [FIRST, SECOND] {
        vgpud.create(&request(uuid)).unwrap();
        guests.push(Some(Guest::attach(&vgpud, uuid)));
    }
    let offsets: Vec<_> = guests.iter().flatten().map(|guest| guest.offset).collect();
    assert_eq!(offsets, [0, 8 * MIB]);
    let mut colours = [BLACK; 2];
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
                let uuid = [FIRST, SECOND][guest];
                assert_eq!(picture(&vgpud, uuid), (number(2), number(3), colour));
            }
            "off" => {
                let guest = guests[number(1) as usize].as_mut().unwrap();
                guest.client.region_write(2, 0x508, &[0, 0]).unwrap();
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
                drop(old);
                vgpud.create(&request(THIRD)).unwrap();
                let third = Guest::attach(&vgpud, THIRD);
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
