//! Arbitrary rings and pushbuffers cause no panic, and change only bytes that the guest may write.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};

use ipc::mem::{Mapping, SharedMemory};
use mdev_core::abi::host::{GpEntry, MethodHeader, SecOp};
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::program::{self, Program};
use mdev_core::abi::qmd::{self, Launch, Qmd};
use mdev_core::abi::{compute, copy, host, userd};
use mdev_core::gpu::{Backing, ChannelSpec, EngineKind, MapRequest, Placement};
use mdev_core::ids::{GpuVa, SpaceId, VgpuId};
use nix::sys::eventfd::EventFd;
use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::address_space::AddressSpaces;
use super::channel::{Channel, Userd};
use super::clock::now_ns;
use super::context::Context;
use super::counters::Counters;
use super::interrupts::Interrupts;
use super::run_limit::RunLimit;
use crate::soft::SoftGpu;

/// Memory: a writable range, a read-only range, and unmapped memory.
const BYTES: u64 = 1 << 20;
const WRITABLE: std::ops::Range<u64> = 0x4_0000..0x6_0000;
const READ_ONLY: std::ops::Range<u64> = 0x8_0000..0x9_0000;
/// Writable in another address space of the same vGPU.
const ELSEWHERE: std::ops::Range<u64> = 0xa_0000..0xc_0000;
/// The USERD is outside of the address space.
const USERD: u64 = 0xf_0000;
const RING: u64 = WRITABLE.start;
const QMD: u64 = WRITABLE.start + 0x1000;
const PROGRAM: u64 = WRITABLE.start + 0x2000;
const CONSTANTS: u64 = WRITABLE.start + 0x3000;
const PUSHBUFFER: u64 = WRITABLE.start + 0x8000;
const ENTRIES: u32 = 16;

fn va(offset: u64) -> u64 {
    VA_START + offset
}

/// Numbers that an attacker would try.
fn number() -> impl Strategy<Value = u32> {
    let near = |at: u64| {
        (0..0x200u32).prop_map(move |n| (va(at) as u32).wrapping_add(n).wrapping_sub(0x100))
    };
    prop_oneof![
        any::<u32>(),
        0..64u32,
        Just(u32::MAX),
        Just((VA_START >> 32) as u32),
        near(WRITABLE.start),
        near(WRITABLE.end),
        near(READ_ONLY.start),
        near(ELSEWHERE.start),
        (0..13u32).prop_map(|bit| 1 << bit),
    ]
}

/// An existing method, with data that is likely to pass the first check.
fn method() -> impl Strategy<Value = Vec<u32>> {
    let call = |subchannel, method, data: Vec<u32>| {
        let count = data.len() as u32;
        let mut words = vec![MethodHeader { op: SecOp::Inc, subchannel, method, count }.encode()];
        words.extend(data);
        words
    };
    let upper = (VA_START >> 32) as u32;
    prop_oneof![
        any::<u32>().prop_map(|word| vec![word]),
        (0..64u32, number()).prop_map(move |(n, data)| call(0, n * 4, vec![data])),
        (number(), number(), number()).prop_map(move |(lo, payload, flags)| {
            call(0, host::SEM_ADDR_LO, vec![lo, upper, payload, 0, flags])
        }),
        (number(), number(), number(), 0..0x2000u32).prop_map(move |(from, to, len, flags)| {
            let mut words = call(4, copy::OFFSET_IN_UPPER, vec![upper, from, upper, to]);
            words.extend(call(4, copy::PITCH_IN, vec![from, to, len, len % 7]));
            words.extend(call(4, copy::LAUNCH_DMA, vec![flags | 0x180]));
            words
        }),
        (number(), number(), number(), 0..0x2000u32).prop_map(
            move |(to, components, len, flags)| {
                let mut words = call(4, copy::OFFSET_OUT_UPPER, vec![upper, to]);
                words.extend(call(4, copy::SET_REMAP_CONST_A, vec![len, to, components]));
                words.extend(call(4, copy::LINE_LENGTH_IN, vec![len, 1]));
                words.extend(call(4, copy::LAUNCH_DMA, vec![flags | 0x582]));
                words
            }
        ),
        (number(), number(), number(), any::<u32>()).prop_map(
            move |(lo, payload, value, flags)| {
                let mut words = call(1, compute::SET_REPORT_SEMAPHORE_A, vec![upper, lo, payload]);
                words.extend(call(1, compute::SET_REPORT_SEMAPHORE_D, vec![flags & !3]));
                let wide = vec![payload, value, lo, upper, flags & !3];
                words.extend(call(1, compute::SET_REPORT_SEMAPHORE_PAYLOAD_LOWER, wide));
                words
            }
        ),
        (number(), 0..40u32, prop::collection::vec(number(), 0..10), number()).prop_map(
            move |(to, len, data, flags)| {
                let mut words = call(1, compute::LINE_LENGTH_IN, vec![len, 1, upper, to]);
                words.extend(call(1, compute::SET_I2M_SEMAPHORE_A, vec![upper, flags, len]));
                words.extend(call(1, compute::LAUNCH_DMA, vec![flags & !2 | 1]));
                for word in data {
                    words.extend(call(1, compute::LOAD_INLINE_DATA, vec![word]));
                }
                words
            }
        ),
        (0..0x1000u32, number())
            .prop_map(move |(method, data)| { call(1, method * 4, vec![data]) }),
        prop_oneof![Just(3), Just(10), number()].prop_map(move |action| {
            let mut words = call(1, compute::SEND_PCAS_A, vec![(va(QMD) >> 8) as u32]);
            words.extend(call(1, compute::SEND_SIGNALING_PCAS2_B, vec![action]));
            words
        }),
    ]
}

#[derive(Clone, Debug)]
struct Case {
    pushbuffer: Vec<Vec<u32>>,
    entries: Vec<u64>,
    put: u32,
    kernel: u32,
    params: Vec<u32>,
    grid: [u32; 4],
    flips: Vec<(u32, u32)>,
    /// Whether the channel is in a created address space.
    created: bool,
}

fn case() -> impl Strategy<Value = Case> {
    let entry = prop_oneof![
        any::<u64>(),
        (0..0x400u64, 0..2000u32).prop_map(|(at, dwords)| {
            GpEntry::Segment { va: va(PUSHBUFFER) + at * 4, dwords }.encode()
        }),
    ];
    (
        prop::collection::vec(method(), 0..40),
        prop::collection::vec(entry, 0..4),
        prop_oneof![1..8u32, any::<u32>()],
        0..7u32,
        prop::collection::vec(number(), 12),
        prop::array::uniform4(number()),
        prop::collection::vec((0..96u32, any::<u32>()), 0..3),
        any::<bool>(),
    )
        .prop_map(|(pushbuffer, entries, put, kernel, params, grid, flips, created)| Case {
            pushbuffer,
            entries,
            put,
            kernel,
            params,
            grid,
            flips,
            created,
        })
}

fn descriptor(case: &Case) -> Vec<u8> {
    let qmd = Qmd::from(Launch {
        grid: [case.grid[0], case.grid[1], 1],
        block: [case.grid[2] % 33, case.grid[3] % 33, 1],
        program: va(PROGRAM),
        constants: va(CONSTANTS),
        constant_bytes: 0x1_fff0,
        registers: 32,
    });
    // One semaphore at the end.
    let [lower, payload] = [case.params[6], case.params[7]];
    let mut bytes = qmd
        .with(qmd::release_enable(0), case.params[8] & 1)
        .with(qmd::release_reduction_enable(0), case.params[9] & 1)
        .with(qmd::release_reduction_op(0), case.params[9] >> 1 & 7)
        .with(qmd::release_address_lower(0), lower)
        .with(qmd::release_address_upper(0), (VA_START >> 32) as u32)
        .with(qmd::release_payload_lower(0), payload)
        .to_bytes();
    for (word, bits) in &case.flips {
        let at = *word as usize * 4;
        bytes[at..at + 4].iter_mut().zip(bits.to_le_bytes()).for_each(|(byte, bits)| *byte ^= bits);
    }
    bytes.to_vec()
}

/// Returns address spaces with the mappings of a case, and the one that its channel is in.
fn mapped_spaces(memory: &Arc<Mapping>, created: bool) -> (AddressSpaces, SpaceId) {
    let mut spaces = AddressSpaces::new(Some(Arc::clone(memory)), 0);
    let second = spaces.create().unwrap();
    let (space, other) =
        if created { (second, SpaceId::DEFAULT) } else { (SpaceId::DEFAULT, second) };
    for (space, range, writable) in
        [(space, WRITABLE, true), (space, READ_ONLY, false), (other, ELSEWHERE, true)]
    {
        let backing = Backing::Vram { offset: range.start };
        let (va, len) = (GpuVa(va(range.start)), range.end - range.start);
        let request = MapRequest { writable, ..MapRequest::new(va, len, backing) };
        spaces.map(&request.in_space(space)).unwrap();
    }
    (spaces, space)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn a_guest_writes_only_its_writable_mappings(case in case()) {
        let memory = SharedMemory::new(c"isolation", BYTES).unwrap().mapping;
        memory.write(0, &vec![0xa5; BYTES as usize]).unwrap();
        let put = |at: u64, bytes: &[u8]| memory.write(at, bytes).unwrap();
        put(WRITABLE.start, &vec![0; (WRITABLE.end - WRITABLE.start) as usize]);
        put(USERD, &[0; 512]);
        let binds: Vec<u32> = [(1, compute::CLASS), (4, copy::CLASS)]
            .into_iter()
            .flat_map(|(subchannel, class)| {
                let header =
                    MethodHeader { op: SecOp::Inc, subchannel, method: host::SET_OBJECT, count: 1 };
                [header.encode(), class]
            })
            .collect();
        let words: Vec<u32> = binds.into_iter().chain(case.pushbuffer.concat()).collect();
        put(PUSHBUFFER, words.as_bytes());
        let first = GpEntry::Segment { va: va(PUSHBUFFER), dwords: words.len() as u32 };
        put(RING, first.encode().as_bytes());
        put(RING + 8, case.entries.as_bytes());
        put(QMD, &descriptor(&case));
        let param_bytes = program::Kernel::from_number(case.kernel).map_or(0, program::Kernel::param_bytes);
        let (magic, version, kernel) = (program::MAGIC, program::VERSION, case.kernel);
        put(PROGRAM, Program { magic, version, kernel, param_bytes }.as_bytes());
        // Most addresses in parameters are in the writable range.
        let params: Vec<u32> = case.params.iter().enumerate()
            .map(|(index, data)| if index % 2 == 1 && index < 6 { (VA_START >> 32) as u32 } else { *data })
            .collect();
        put(CONSTANTS, [case.grid[2] % 33, case.grid[3] % 33, 1].as_bytes());
        put(CONSTANTS + compute::PARAM_BASE, params.as_bytes());

        let (spaces, space) = mapped_spaces(&memory, case.created);
        let spec = ChannelSpec {
            engine: EngineKind::Compute,
            gpfifo: GpuVa(va(RING)),
            gpfifo_entries: ENTRIES,
            userd: Backing::Vram { offset: USERD },
            vector: 0,
            space,
            group: None,
            placement: Placement::default(),
            preamble: None,
        };
        let userd = Userd { mapping: Arc::clone(&memory), offset: USERD, memory: None };
        let mut channel = Channel::new(spec, userd, 0);
        memory.store_u32(USERD + userd::GP_PUT, case.put).unwrap();
        let status = SharedMemory::new(c"status", 4096).unwrap().mapping;
        let interrupts = Interrupts::new(status, EventFd::new().unwrap().into()).unwrap();
        let (waiting, gate_open) = (AtomicU32::new(0), AtomicBool::new(true));
        let started = now_ns();
        let limit = RunLimit { end_ns: started + 300_000, waiting_requests: &waiting, gate_open: &gate_open, turn: None };
        let gpu = SoftGpu::new("soft0", BYTES);
        let vgpu = VgpuId::random();
        let cx = Context {
            hardware: &gpu,
            vgpu,
            space: spaces.get(space).unwrap(),
            limit: &limit,
            interrupts: &interrupts,
            vector: 0,
        };
        // The second run continues an operation that was preempted.
        for _ in 0..2 {
            if let Err(fault) = channel.run(cx, &Counters::default(), &mut None) {
                channel.fail(fault);
                break;
            }
        }

        let mut after = vec![0; BYTES as usize];
        memory.read(0, &mut after).unwrap();
        for (at, byte) in after.iter().enumerate() {
            let at = at as u64;
            let may_change = WRITABLE.contains(&at) || (USERD..USERD + 512).contains(&at);
            prop_assert!(may_change || *byte == 0xa5, "{at:#x} was written");
        }
    }
}
