//! A vGPU from the guest CPU's side, exit by exit: a VM under KVM, with a worker of `vgpud` behind
//! its BARs.
//!
//! The guest's code is a few hundred bytes assembled here, so that every KVM runs it and each exit
//! is predictable. Without KVM the tests are skipped.

// Clippy recognizes only functions marked as tests, not the functions that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use mdev_core::abi::control::{self, reg};
use mdev_core::abi::host::{self, GpEntry, MethodHeader, SecOp, sem};
use mdev_core::abi::mailbox::{
    ChannelCreate, ENGINE_COPY, Header, MapGuest, Opcode, PAYLOAD, Scatter, USERD_GUEST, VA_START,
};
use mdev_core::abi::{doorbell, userd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::json;
use system_tests::bytes;
use system_tests::raw_client::{DMA_MAP, GET_REGION_IO_FDS, RawClient, SET_IRQS};
use system_tests::vmm::{self, Access, Code, LINE_VECTOR, MESSAGE_VECTOR, Machine};
use system_tests::{Vgpud, wait_for};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use zerocopy::IntoBytes;

const DOORBELL: u32 = 1;
const CONTROL: u32 = 3;
const VRAM: u32 = 4;
const CONFIG: u32 = 7;

/// Addresses of the BARs, chosen here in place of firmware.
const DOORBELL_AT: u32 = 0xcf00_0000;
const CONTROL_AT: u32 = 0xcf10_0000;
const VRAM_AT: u32 = 0xe000_0000;

const RAM_BYTES: usize = 1 << 20;
/// Words that the guest writes as results.
const RESULTS: u32 = 0x9000;
/// Flags that interrupt handlers set.
const HANDLERS: u32 = 0xa000;
const MESSAGES: u32 = RESULTS + 0x100;
const LINES: u32 = RESULTS + 0x104;
const TOKEN: u32 = RESULTS + 0x108;
const MAILBOX: u32 = 0x1_0000;
/// The channel's memory, mapped for the GPU from this address on.
const RING: u32 = 0x1_1000;
const USERD: u32 = 0x1_2000;
const SEMAPHORE: u32 = 0x1_3000;
const PUSHBUFFER: u32 = 0x1_4000;
const CHANNEL_BYTES: u32 = 0x4000;

/// Returns the guest-physical address of a control register.
fn control(register: u64) -> u32 {
    CONTROL_AT + register as u32
}

fn gpu_address(address: u32) -> u64 {
    VA_START + u64::from(address - RING)
}

/// Returns whether KVM is usable; reports a skipped test otherwise.
fn kvm() -> bool {
    let Err(error) = vmm::probe() else { return true };
    system_tests::skipped(&format!("{error:#}"));
    false
}

/// A VM with a vGPU.
struct Plugged {
    machine: Machine,
    client: RawClient,
    _vgpud: Vgpud,
}

impl Plugged {
    fn new() -> Self {
        let vgpud = Vgpud::start().unwrap();
        let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true })).unwrap();
        let mut client = RawClient::attach(&vgpud.vfio_socket(&uuid));
        let ram: OwnedFd = memfd_create(c"guest", MFdFlags::MFD_CLOEXEC).unwrap();
        nix::unistd::ftruncate(&ram, i64::try_from(RAM_BYTES).unwrap()).unwrap();
        let mut machine = Machine::new(std::os::fd::AsFd::as_fd(&ram), RAM_BYTES).unwrap();
        let map = bytes![32_u32, 3_u32, 0_u64, 0_u64, RAM_BYTES as u64];
        client.ok_with(DMA_MAP, &map, &[&ram]);
        for (region, address) in [(DOORBELL, DOORBELL_AT), (VRAM, VRAM_AT)] {
            let info = client.region(region);
            machine.map(&info.fds[0], address.into(), info.u64_at(16) as usize).unwrap();
        }
        client.write(CONFIG, 4, &[6, 0]);
        Self { machine, client, _vgpud: vgpud }
    }

    /// Runs code and returns the accesses that cause exits. All must be to control registers.
    fn run(&mut self, code: Code) -> u64 {
        let client = &mut self.client;
        let exits = self.machine.run(code, |access| {
            let place = |address: u64| {
                let offset = address.checked_sub(CONTROL_AT.into());
                offset
                    .filter(|offset| *offset < control::BAR_BYTES)
                    .unwrap_or_else(|| panic!("unexpected exit for {address:#x}"))
            };
            match access {
                Access::Read(address, data) => {
                    let bytes = client.read(CONTROL, place(address), data.len() as u32);
                    data.copy_from_slice(&bytes);
                }
                Access::Write(address, data) => client.write(CONTROL, place(address), data),
            }
        });
        exits.unwrap().memory
    }

    fn result(&self, index: u32) -> u32 {
        self.machine.word(RESULTS + 4 * index)
    }
}

/// Returns code that writes words one after another.
fn put_words(code: Code, address: u32, bytes: &[u8]) -> Code {
    bytes.chunks_exact(4).zip(0..).fold(code, |code, (word, index)| {
        code.put(address + 4 * index, u32::from_le_bytes(word.try_into().unwrap()))
    })
}

/// Returns code that submits a mailbox request: one exit.
fn request(code: Code, opcode: Opcode, payload: &[u8]) -> Code {
    let header = Header {
        opcode: opcode as u32,
        status: u32::MAX,
        request_bytes: payload.len() as u32,
        ..Header::default()
    };
    let code = put_words(code, MAILBOX, header.as_bytes());
    let code = put_words(code, MAILBOX + PAYLOAD as u32, payload);
    code.put(control(reg::MAILBOX_DOORBELL), 1)
}

#[test]
fn registers_and_mailbox_cost_one_exit_per_access() {
    if !kvm() {
        return;
    }
    let mut vm = Plugged::new();
    let code = Code::new()
        .copy(control(reg::MAGIC), RESULTS)
        .copy(control(reg::VERSION), RESULTS + 4)
        .put(control(reg::MAILBOX_LO), MAILBOX);
    let code = request(code, Opcode::GetInfo, &[])
        .copy(control(reg::MAILBOX_STATUS), RESULTS + 8)
        .copy(MAILBOX + 4, RESULTS + 12)
        .copy(MAILBOX + PAYLOAD as u32, RESULTS + 16);
    assert_eq!(vm.run(code), 5, "three reads and two writes of registers");
    assert_eq!([vm.result(0), vm.result(1)], [control::MAGIC, control::VERSION]);
    assert_eq!([vm.result(2), vm.result(3)], [0, 0], "the request completed with its write");
    assert_eq!(vm.result(4), 256 << 20, "bytes of video memory");
}

#[test]
fn video_memory_and_doorbell_cost_no_exit() {
    if !kvm() {
        return;
    }
    let mut vm = Plugged::new();
    let pattern: Vec<u8> = (0..256_u32).flat_map(|n| (n * 0x9e37 + 7).to_le_bytes()).collect();
    assert_eq!(vm.run(put_words(Code::new(), VRAM_AT + 0x2000, &pattern)), 0);
    assert_eq!(vm.client.read(VRAM, 0x2000, 1024), pattern, "what the guest wrote");
    vm.client.write(VRAM, 0x1_0000, &0xfeed_f00d_u32.to_le_bytes());
    assert_eq!(vm.run(Code::new().copy(VRAM_AT + 0x1_0000, RESULTS)), 0);
    assert_eq!(vm.result(0), 0xfeed_f00d, "what the host wrote");

    // The GPU ignores a token without a channel, however often the guest writes it.
    let ring = Code::new().store_often(DOORBELL_AT + doorbell::TOKEN as u32, 100_000);
    assert_eq!(vm.run(ring), 0, "a hundred thousand doorbells");
    let trapped = vm.run(Code::new().copy(control(reg::TRAPPED_DOORBELLS), RESULTS));
    assert_eq!((trapped, vm.result(0)), (1, 0));
}

/// Assigns eventfds to an index's interrupts.
fn set_eventfds(client: &mut RawClient, index: u32, action: u32, events: &[&EventFd]) {
    let fds: Vec<OwnedFd> = events
        .iter()
        .map(|event| {
            // SAFETY: the eventfd is open while it is borrowed.
            let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
            fd.try_clone_to_owned().unwrap()
        })
        .collect();
    let fds: Vec<&OwnedFd> = fds.iter().collect();
    let request = bytes![20_u32, 4 | action, index, 0_u32, fds.len() as u32];
    client.ok_with(SET_IRQS, &request, &fds);
}

/// Creates a channel, with a pushbuffer that writes the semaphore and then interrupts.
fn make_channel() -> Code {
    let header =
        |method, count| MethodHeader { op: SecOp::Inc, subchannel: 0, method, count }.encode();
    let at = gpu_address(SEMAPHORE);
    let words = [
        header(host::SEM_ADDR_LO, 5),
        at as u32,
        (at >> 32) as u32,
        1,
        0,
        sem::RELEASE | sem::RELEASE_WFI,
        header(host::NON_STALL_INTERRUPT, 1),
        0,
    ];
    let segment = GpEntry::Segment { va: gpu_address(PUSHBUFFER), dwords: words.len() as u32 };
    let code = put_words(Code::new(), PUSHBUFFER, words.as_bytes());
    let code =
        (0..2).fold(code, |code, n| put_words(code, RING + 8 * n, &segment.encode().to_le_bytes()));
    let map = MapGuest { va: VA_START, flags: 0, count: 1 };
    let page = Scatter { address: RING.into(), length: CHANNEL_BYTES.into() };
    let create = ChannelCreate {
        engine: ENGINE_COPY,
        gpfifo_entries: 16,
        gpfifo_va: VA_START,
        userd: USERD.into(),
        userd_aperture: USERD_GUEST,
        vector: 1,
        ..ChannelCreate::default()
    };
    let code = code.put(control(reg::MAILBOX_LO), MAILBOX);
    let code = request(code, Opcode::MapGuest, &[map.as_bytes(), page.as_bytes()].concat());
    let code = code.copy(MAILBOX + 4, RESULTS);
    request(code, Opcode::ChannelCreate, create.as_bytes())
        .copy(MAILBOX + 4, RESULTS + 4)
        .copy(MAILBOX + PAYLOAD as u32 + 4, TOKEN)
        .put(control(reg::INTR_ENABLE), 1)
}

/// Submits the pushbuffer again, wakes the GPU and waits for the semaphore.
fn submit(code: Code, put: u32) -> Code {
    code.put(SEMAPHORE, 0)
        .put(USERD + userd::GP_PUT as u32, put)
        .fence()
        .copy(TOKEN, DOORBELL_AT + doorbell::TOKEN as u32)
        .copy(TOKEN, control(reg::WAKE))
        .wait_for(SEMAPHORE)
}

#[test]
fn waking_a_sleeping_gpu_costs_no_exit_to_the_hypervisor() {
    if !kvm() {
        return;
    }
    let mut vm = Plugged::new();
    let offer = vm.client.ok(GET_REGION_IO_FDS, &bytes![4096_u32, 0_u32, CONTROL, 0_u32]);
    assert_eq!((offer.u32_at(12), offer.fds.len()), (1, 1), "one register of the control BAR");
    let (offset, size, flags) = (offer.u64_at(16), offer.u64_at(24), offer.u32_at(40));
    assert_eq!((offset, size, flags), (reg::WAKE, 4, 0));
    let event = offer.fds.into_iter().next().unwrap();
    // SAFETY: ownership of the descriptor moves to the EventFd.
    let event = unsafe { EventFd::from_raw_fd(event.into_raw_fd()) };
    vm.machine.wire_write(&event, control(offset)).unwrap();

    vm.run(make_channel());
    assert_eq!([vm.result(0), vm.result(1)], [0, 0], "memory is mapped and the channel made");
    for put in 1..=5 {
        wait_for("the GPU sleeps", || vm.machine.word(USERD + userd::NEED_WAKEUP as u32) != 0)
            .unwrap();
        assert_eq!(vm.run(submit(Code::new(), put % 2)), 0, "an exit for the wake-up");
        assert_eq!(vm.machine.word(SEMAPHORE), 1, "the work is done");
    }
    let trapped = Code::new().copy(control(reg::TRAPPED_DOORBELLS), RESULTS);
    assert_eq!((vm.run(trapped), vm.result(0)), (1, 0), "the worker got no request");
}

#[test]
fn channel_interrupts_reach_the_guests_cpu() {
    const INTX: u32 = 0;
    const MSI: u32 = 1;
    const UNMASK: u32 = 1 << 4;
    const TRIGGER: u32 = 1 << 5;
    if !kvm() {
        return;
    }
    let mut vm = Plugged::new();
    let [message, other, line, unmask] = [(); 4].map(|()| EventFd::new(EFD_NONBLOCK).unwrap());
    let wired = vm.machine.interrupts;
    if wired {
        vm.machine.wire_message(&message).unwrap();
        vm.machine.wire_line(&line, &unmask).unwrap();
        vm.machine.on_interrupt(MESSAGE_VECTOR, HANDLERS, Code::new().put(MESSAGES, 1));
        let handler = Code::new()
            .copy(control(reg::INTR_STATUS), RESULTS + 8)
            .put(control(reg::INTR_STATUS), 1)
            .put(LINES, 1);
        vm.machine.on_interrupt(LINE_VECTOR, HANDLERS + 0x100, handler);
        vm.run(Code::new().take_interrupts());
    } else {
        let text = "note: this KVM takes no interrupts from eventfds: the eventfds are looked at";
        let _ = writeln!(std::io::stderr(), "{text}");
    }
    let arrived = |event: &EventFd| {
        wait_for("an interrupt", || event.read().is_ok()).unwrap();
    };

    set_eventfds(&mut vm.client, MSI, TRIGGER, &[&other, &message]);
    vm.run(make_channel());
    assert_eq!([vm.result(0), vm.result(1)], [0, 0], "memory is mapped and the channel made");
    let code = submit(Code::new(), 1);
    vm.run(if wired { code.wait_for(MESSAGES) } else { code });
    if !wired {
        arrived(&message);
    }

    // With MSI disabled, the channel's next interrupt raises INTx until the guest clears the cause.
    vm.client.ok(SET_IRQS, &bytes![20_u32, 1 | TRIGGER, MSI, 0_u32, 0_u32]);
    vm.run(Code::new().put(control(reg::INTR_STATUS), u32::MAX));
    set_eventfds(&mut vm.client, INTX, UNMASK, &[&unmask]);
    set_eventfds(&mut vm.client, INTX, TRIGGER, &[&line]);
    let code = submit(Code::new(), 2);
    vm.run(if wired { code.wait_for(LINES) } else { code });
    if wired {
        assert_eq!(vm.result(2), 1, "the cause that the handler read");
    } else {
        arrived(&line);
    }
    assert_eq!(vm.machine.word(SEMAPHORE), 1);
}
