//! What programs do on a vGPU. The tests start this program again with one of these.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::driver_api::{Cuda, OUT_OF_MEMORY, ok};

/// Environment variable that is set in programs on a vGPU.
pub const MARK: &str = "TESSERA_TEST_INSIDE";

/// Returns whether this process runs on a vGPU.
fn is_inside() -> bool {
    std::env::var_os(MARK).is_some()
}

/// Length of the copies in streams, in bytes.
const LEN: usize = 8 << 20;

/// Returns bytes that differ from place to place.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect()
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
        ensure!(filled.chunks_exact(4).all(|word| word == [0xa5, 2, 1, 0x5a]), "{len} filled");
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
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end {
        ensure!(cuda.download(memory, 4)? == b"held");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
