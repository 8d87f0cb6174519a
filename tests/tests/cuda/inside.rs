//! What programs do on a vGPU. The tests start this program again with one of these.

use std::ptr::null_mut;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use system_tests::checkpoint_tool;
use system_tests::driver_api::{Cuda, FillParams, ILLEGAL_ADDRESS, IpcHandle, OUT_OF_MEMORY, ok};

/// Environment variable that is set in programs on a vGPU.
pub const MARK: &str = "TESSERA_TEST_INSIDE";

/// Returns whether this process runs on a vGPU.
fn is_inside() -> bool {
    std::env::var_os(MARK).is_some()
}

/// Checks that nothing of the host but the vGPU's socket leads to a GPU.
#[test]
#[ignore = "runs in a container only"]
fn is_in_a_container() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    // Of the folder's entries, only those that the test made.
    let names = std::fs::read_dir("/dev")?.map(|entry| Ok(entry?.file_name()));
    let mut names = names.collect::<Result<Vec<_>>>()?;
    names.sort();
    ensure!(names == ["null", "shm", "urandom", "zero"], "{names:?}");
    ensure!(!nix::unistd::geteuid().is_root() && std::process::id() < 10);
    // The first device of libcuda is the vGPU.
    let cuda = Cuda::with_context()?;
    ensure!(cuda.name()?.starts_with("Tessera "), "{}", cuda.name()?);
    Ok(())
}

/// Length of the copies in streams, in bytes.
const LEN: usize = 8 << 20;

/// Returns bytes that differ from place to place: repetitions of a part of a prime length, which
/// begins at another place of each page. This program is not optimized, and a VM's emulated CPU is
/// slow.
fn pattern(len: usize) -> Vec<u8> {
    const PART: u32 = 65_537;
    let part: Vec<u8> =
        (0..PART).map(|index| index.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    let mut bytes = part.repeat(len.div_ceil(part.len()));
    bytes.truncate(len);
    bytes
}

#[test]
#[ignore = "runs on a vGPU only"]
fn copies() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let cuda = Cuda::with_context()?;
    for len in [4, 4096, 65_536 + 12, 3 << 20, 40 << 20] {
        let data = pattern(len);
        let (first, second) = (cuda.alloc(len)?, cuda.alloc(len)?);
        cuda.upload(first, &data)?;
        ok("cuMemcpyDtoD", cuda.memcpy_dtod(second, first, len))?;
        ensure!(cuda.download(second, len)? == data, "{len} bytes differ");
        ok("cuMemsetD32", cuda.memset_d32(first, 0x5a01_02a5, len / 4))?;
        let filled = cuda.download(first, len / 4 * 4)?;
        ensure!(filled == [0xa5, 2, 1, 0x5a].repeat(len / 4), "{len} filled");
        ok("cuMemFree", cuda.mem_free(first))?;
        ok("cuMemFree", cuda.mem_free(second))?;
    }
    Ok(())
}

#[test]
#[ignore = "runs on a vGPU only"]
fn identity() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let cuda = Cuda::with_context()?;
    let mut uuid = [0; 16];
    ok("cuDeviceGetUuid", cuda.device_get_uuid(&raw mut uuid, 0))?;
    let hex = format!("{:032x}", u128::from_be_bytes(uuid));
    let (free, total) = cuda.memory()?;
    println!("name={} uuid={hex} total={total} free={free}", cuda.name()?);
    Ok(())
}

#[test]
#[ignore = "runs on a vGPU only"]
fn out_of_memory() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let cuda = Cuda::with_context()?;
    let (free, total) = cuda.memory()?;
    let mut ptr = 0;
    let code = cuda.mem_alloc(&raw mut ptr, total)?;
    ensure!(code == OUT_OF_MEMORY, "{total} of {total} bytes: {code}");
    // The context still works, and the rest can be had.
    let rest = free - (8 << 20);
    let memory = cuda.alloc(rest)?;
    cuda.upload(memory, b"rest")?;
    ensure!(cuda.download(memory, 4)? == b"rest");
    ok("cuMemFree", cuda.mem_free(memory))
}

#[test]
#[ignore = "runs on a vGPU only"]
fn streams_and_events() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let cuda = Cuda::with_context()?;
    let mut streams = [std::ptr::null_mut(); 2];
    for stream in &mut streams {
        ok("cuStreamCreate", cuda.stream_create(stream, 1))?;
    }
    let mut events = [std::ptr::null_mut(); 2];
    for event in &mut events {
        ok("cuEventCreate", cuda.event_create(event, 0))?;
    }
    let mut pinned = std::ptr::null_mut();
    ok("cuMemAllocHost", cuda.mem_alloc_host(&raw mut pinned, LEN))?;
    ensure!(!pinned.is_null());
    let memory = cuda.alloc(LEN)?;
    ok("cuEventRecord", cuda.event_record(events[0], streams[0]))?;
    for _ in 0..10 {
        ok("cuMemcpyHtoDAsync", cuda.memcpy_htod_async(memory, pinned, LEN, streams[0]))?;
    }
    ok("cuEventRecord", cuda.event_record(events[1], streams[0]))?;
    ok("cuEventSynchronize", cuda.event_synchronize(events[1]))?;
    ok("cuStreamSynchronize", cuda.stream_synchronize(streams[1]))?;
    let mut ms = 0.0;
    ok("cuEventElapsedTime", cuda.event_elapsed_time(&raw mut ms, events[0], events[1]))?;
    ensure!(ms > 0.0 && ms < 60_000.0, "{ms} ms");
    Ok(())
}

#[test]
#[ignore = "runs on a vGPU only"]
fn managed_memory() -> Result<()> {
    const ATTACH_GLOBAL: u32 = 1;
    if !is_inside() {
        return Ok(());
    }
    let cuda = Cuda::with_context()?;
    for len in [4096, 1 << 20, 40 << 20] {
        let data = pattern(len);
        let mut managed = 0;
        ok("cuMemAllocManaged", cuda.mem_alloc_managed(&raw mut managed, len, ATTACH_GLOBAL))?;
        // SAFETY: managed memory of this length, which the GPU does not use now.
        let cpu = unsafe { std::slice::from_raw_parts_mut(managed as *mut u8, len) };
        cpu.copy_from_slice(&data);
        let copy = cuda.alloc(len)?;
        ok("cuMemcpyDtoD", cuda.memcpy_dtod(copy, managed, len))?;
        ensure!(cuda.download(copy, len)? == data, "the GPU reads other data");
        ok("cuMemsetD32", cuda.memset_d32(managed, 0x0102_0304, len / 4))?;
        ensure!(cuda.download(managed, 4)? == [4, 3, 2, 1]);
        ensure!(cpu[len - 1] == 1, "the CPU reads {}", cpu[len - 1]);
        ok("cuMemFree", cuda.mem_free(managed))?;
        ok("cuMemFree", cuda.mem_free(copy))?;
    }
    Ok(())
}

#[test]
#[ignore = "runs on a vGPU only"]
fn uses_memory_that_it_has_freed() -> Result<()> {
    const LEN: usize = 64 << 20;
    if !is_inside() {
        return Ok(());
    }
    let cuda = Cuda::with_context()?;
    let (mut graph, mut node, mut executable) = (null_mut(), null_mut(), null_mut());
    let (mut context, mut stream) = (null_mut(), null_mut());
    ok("cuCtxGetCurrent", cuda.ctx_get_current(&raw mut context))?;
    ok("cuStreamCreate", cuda.stream_create(&raw mut stream, 1))?;
    let memory = cuda.alloc(LEN)?;
    let fill = FillParams { to: memory, pitch: 0, value: 7, element: 4, width: LEN / 4, height: 1 };
    ok("cuGraphCreate", cuda.graph_create(&raw mut graph, 0))?;
    let none = std::ptr::null();
    let added = cuda.graph_add_memset_node(&raw mut node, graph, none, 0, &raw const fill, context);
    ok("cuGraphAddMemsetNode", added)?;
    ok("cuGraphInstantiate", cuda.graph_instantiate(&raw mut executable, graph, 0))?;
    ok("cuGraphLaunch", cuda.graph_launch(executable, stream))?;
    ok("cuStreamSynchronize", cuda.stream_synchronize(stream))?;
    ok("cuMemFree", cuda.mem_free(memory))?;
    // A graph is not checked again when it is launched.
    let launched = cuda.graph_launch(executable, stream)?;
    let code = cuda.stream_synchronize(stream)?;
    ensure!(launched == 0 && code == ILLEGAL_ADDRESS, "launch {launched}, then {code}");
    Ok(())
}

#[test]
#[ignore = "runs on a vGPU only"]
fn a_long_wait_ends_with_the_work() -> Result<()> {
    const LEN: usize = 16 << 20;
    const WITHOUT_TIME: u32 = 2;
    // After a second, libcuda asks the driver to look for interrupts.
    const LONG: Duration = Duration::from_millis(1500);
    if !is_inside() {
        return Ok(());
    }
    let cuda = Cuda::with_context()?;
    let (mut pinned, mut stream, mut event) = (null_mut(), null_mut(), null_mut());
    ok("cuMemAllocHost", cuda.mem_alloc_host(&raw mut pinned, LEN))?;
    ok("cuStreamCreate", cuda.stream_create(&raw mut stream, 0))?;
    ok("cuEventCreate", cuda.event_create(&raw mut event, WITHOUT_TIME))?;
    let memory = cuda.alloc(LEN)?;
    let mut copies = 10;
    loop {
        let started = Instant::now();
        for _ in 0..copies {
            ok("cuMemcpyHtoDAsync", cuda.memcpy_htod_async(memory, pinned, LEN, stream))?;
        }
        ok("cuEventRecord", cuda.event_record(event, stream))?;
        ok("cuStreamSynchronize", cuda.stream_synchronize(stream))?;
        ok("cuEventQuery", cuda.event_query(event))?;
        if started.elapsed() >= LONG {
            return Ok(());
        }
        copies *= 2;
    }
}

/// Environment variables with the handles of another process's memory and event.
const HANDLE: &str = "TESSERA_TEST_HANDLE";
const EVENT: &str = "TESSERA_TEST_EVENT";

fn to_text(handle: IpcHandle) -> String {
    handle.0.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

fn from_text(text: &str) -> Result<IpcHandle> {
    let mut handle = IpcHandle([0; 64]);
    for (byte, at) in handle.0.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(text.get(at..at + 2).context("A short handle")?, 16)?;
    }
    Ok(handle)
}

#[test]
#[ignore = "runs on a vGPU only"]
fn exports_memory_and_an_event() -> Result<()> {
    const SHARED_WITHOUT_TIME: u32 = 2 | 4;
    if !is_inside() {
        return Ok(());
    }
    let cuda = Cuda::with_context()?;
    let memory = cuda.alloc(4 << 20)?;
    cuda.upload(memory, b"from the first")?;
    let mut handle = IpcHandle([0; 64]);
    ok("cuIpcGetMemHandle", cuda.ipc_get_mem_handle(&raw mut handle, memory))?;
    let mut event = std::ptr::null_mut();
    ok("cuEventCreate", cuda.event_create(&raw mut event, SHARED_WITHOUT_TIME))?;
    ok("cuEventRecord", cuda.event_record(event, std::ptr::null_mut()))?;
    let mut event_handle = IpcHandle([0; 64]);
    ok("cuIpcGetEventHandle", cuda.ipc_get_event_handle(&raw mut event_handle, event))?;
    let mut command = std::process::Command::new(std::env::current_exe()?);
    command.args(["--exact", "inside::imports_memory_and_an_event", "--ignored"]);
    command.env(HANDLE, to_text(handle)).env(EVENT, to_text(event_handle));
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success() && text.contains("1 passed"), "{text}");
    ensure!(cuda.download(memory, 15)? == b"from the second");
    Ok(())
}

#[test]
#[ignore = "runs on a vGPU only"]
fn imports_memory_and_an_event() -> Result<()> {
    const LAZY_PEER_ACCESS: u32 = 1;
    let Ok(text) = std::env::var(HANDLE) else { return Ok(()) };
    let handle = from_text(&text)?;
    let event_handle = from_text(&std::env::var(EVENT)?)?;
    let cuda = Cuda::with_context()?;
    let mut memory = 0;
    let mut event = std::ptr::null_mut();
    ok("cuIpcOpenEventHandle", cuda.ipc_open_event_handle(&raw mut event, event_handle))?;
    ok("cuEventSynchronize", cuda.event_synchronize(event))?;
    let opened = cuda.ipc_open_mem_handle(&raw mut memory, handle, LAZY_PEER_ACCESS);
    ok("cuIpcOpenMemHandle", opened)?;
    ensure!(cuda.download(memory, 14)? == b"from the first");
    cuda.upload(memory, b"from the second")?;
    ok("cuIpcCloseMemHandle", cuda.ipc_close_mem_handle(memory))
}

/// Environment variable with the process for [`toggles`].
pub const PROCESS: &str = "TESSERA_TEST_PROCESS";

/// Checkpoints or restores another process.
#[test]
#[ignore = "runs on a vGPU only"]
fn toggles() -> Result<()> {
    let Ok(pid) = std::env::var(PROCESS) else { return Ok(()) };
    checkpoint_tool::toggle(pid.parse()?)
}

/// Keeps managed memory until it is killed.
#[test]
#[ignore = "runs on a vGPU only"]
fn keeps_managed_memory() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let cuda = Cuda::with_context()?;
    let mut managed = 0;
    ok("cuMemAllocManaged", cuda.mem_alloc_managed(&raw mut managed, 1 << 20, 1))?;
    println!("round 0");
    std::thread::sleep(Duration::from_secs(600));
    Ok(())
}

/// Looks at its memory of several kinds, round by round, until it is killed.
#[test]
#[ignore = "runs on a vGPU only"]
fn keeps_its_memory() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let cuda = Cuda::with_context()?;
    let (mut pinned, mut stream, mut event) = (null_mut(), null_mut(), null_mut());
    ok("cuMemAllocHost", cuda.mem_alloc_host(&raw mut pinned, LEN))?;
    ok("cuStreamCreate", cuda.stream_create(&raw mut stream, 1))?;
    ok("cuEventCreate", cuda.event_create(&raw mut event, 0))?;
    let data = pattern(LEN);
    // SAFETY: pinned memory of this length, which the GPU does not use now.
    unsafe { pinned.cast::<u8>().copy_from_nonoverlapping(data.as_ptr(), LEN) };
    let (first, second) = (cuda.alloc(LEN)?, cuda.alloc(LEN)?);
    cuda.upload(first, &data)?;
    // Not for ever, in case that nothing kills it. A VM's emulated CPU is slow.
    let end = Instant::now() + Duration::from_secs(600);
    for round in 0.. {
        ensure!(cuda.download(first, LEN)? == data, "its memory differs");
        ok("cuMemsetD32", cuda.memset_d32(second, round, LEN / 4))?;
        ensure!(cuda.download(second, 4)? == round.to_le_bytes(), "a fill is wrong");
        ok("cuMemcpyHtoDAsync", cuda.memcpy_htod_async(second, pinned, LEN, stream))?;
        ok("cuEventRecord", cuda.event_record(event, stream))?;
        ok("cuEventSynchronize", cuda.event_synchronize(event))?;
        ensure!(cuda.download(second, LEN)? == data, "a copy of pinned memory differs");
        let other = cuda.alloc(1 << 20)?;
        ok("cuMemFree", cuda.mem_free(other))?;
        println!("round {round}");
        if Instant::now() > end {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Keeps a context until it is killed.
#[test]
#[ignore = "runs on a vGPU only"]
fn waits() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let cuda = Cuda::with_context()?;
    let memory = cuda.alloc(64 << 20)?;
    cuda.upload(memory, b"held").context("The copy failed")?;
    println!("ready");
    // Not for ever, in case that nothing kills it. A VM's emulated CPU is slow.
    let end = Instant::now() + Duration::from_secs(600);
    while Instant::now() < end {
        ensure!(cuda.download(memory, 4)? == b"held");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Allocates memory of all kinds, copies with checked results, and frees the memory, until its
/// standard input ends. Prints the number of rounds.
#[test]
#[ignore = "runs on a vGPU only"]
fn works_until_told() -> Result<()> {
    const LEN: usize = 3 << 20;
    const ATTACH_GLOBAL: u32 = 1;
    if !is_inside() {
        return Ok(());
    }
    let cuda = Cuda::with_context()?;
    println!("ready");
    let told = std::thread::spawn(|| std::io::stdin().lines().count());
    let (mut rounds, mut free_before) = (0_usize, None);
    while !told.is_finished() {
        let data = pattern(LEN - rounds % 8);
        let (mut pinned, mut stream, mut event) = (null_mut(), null_mut(), null_mut());
        ok("cuMemAllocHost", cuda.mem_alloc_host(&raw mut pinned, LEN))?;
        // SAFETY: pinned memory of this length, which the GPU does not use now.
        let cpu = unsafe { std::slice::from_raw_parts_mut(pinned.cast::<u8>(), data.len()) };
        cpu.copy_from_slice(&data);
        let mut managed = 0;
        ok("cuMemAllocManaged", cuda.mem_alloc_managed(&raw mut managed, LEN, ATTACH_GLOBAL))?;
        let memory = cuda.alloc(LEN)?;
        ok("cuStreamCreate", cuda.stream_create(&raw mut stream, 1))?;
        ok("cuEventCreate", cuda.event_create(&raw mut event, 0))?;
        ok("cuMemcpyHtoDAsync", cuda.memcpy_htod_async(memory, pinned, data.len(), stream))?;
        ok("cuEventRecord", cuda.event_record(event, stream))?;
        ok("cuEventSynchronize", cuda.event_synchronize(event))?;
        ok("cuMemcpyDtoD", cuda.memcpy_dtod(managed, memory, data.len()))?;
        ensure!(cuda.download(managed, data.len())? == data, "other data in round {rounds}");
        ok("cuMemFree", cuda.mem_free(memory))?;
        ok("cuMemFree", cuda.mem_free(managed))?;
        ok("cuMemFreeHost", cuda.mem_free_host(pinned))?;
        ok("cuEventDestroy", cuda.event_destroy(event))?;
        ok("cuStreamDestroy", cuda.stream_destroy(stream))?;
        rounds += 1;
        // libcuda keeps some memory of the first rounds.
        let free = cuda.memory()?.0;
        if rounds == 3 {
            free_before = Some(free);
        }
        let lost = free_before.filter(|before| free < *before);
        ensure!(lost.is_none(), "{free} bytes are free in round {rounds}, not {lost:?}");
    }
    println!("rounds={rounds}");
    Ok(())
}
