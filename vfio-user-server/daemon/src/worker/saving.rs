//! Saving and restoring the vGPU, as the manager requests.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result, bail};
use ipc::mem::file_of;
use mdev_core::device::{SavedMemory, SavedVgpu, VirtualFunction};
use mdev_core::gpu::Aperture;
use mdev_core::ids::GuestPa;
use mdev_core::stream::MAX_STATE;

use crate::guest_pieces;
use crate::worker_protocol::{MemoryRange, Restored, WorkerReply, WorkerRequest};

/// Returns the reply to a request about saving, and its descriptors.
pub fn answer(
    function: &mut VirtualFunction,
    request: &WorkerRequest,
    fd: Option<OwnedFd>,
) -> Result<(WorkerReply, Vec<OwnedFd>)> {
    match request {
        WorkerRequest::CheckSave => function.check_saveable()?,
        WorkerRequest::Checkpoint => {
            let done = function.checkpoint()?;
            return Ok((WorkerReply::Checkpoint { done }, Vec::new()));
        }
        WorkerRequest::Pause => function.pause()?,
        WorkerRequest::Resume => function.resume()?,
        WorkerRequest::Discard => function.discard(),
        WorkerRequest::CopyStaged(copy) => function.copy_staged(*copy)?,
        WorkerRequest::Save => {
            let state = serde_json::to_vec(&function.save_vgpu()?)?;
            let (memory, file) = video_memory(function)?;
            return Ok((WorkerReply::Saved(memory), vec![file_of(c"vgpu-state", &state)?, file]));
        }
        WorkerRequest::Restore => {
            let mut state = Vec::new();
            let file = File::from(fd.context("The state is missing")?);
            file.take(MAX_STATE).read_to_end(&mut state)?;
            let state: SavedVgpu =
                serde_json::from_slice(&state).context("The saved vGPU cannot be read")?;
            function.restore_vgpu(&state)?;
            let (memory, file) = video_memory(function)?;
            let restored = Restored { memory, config: function.config_writes() };
            return Ok((WorkerReply::Restored(restored), vec![file]));
        }
        WorkerRequest::Written { from } => {
            let (file, next) = written(function, *from)?;
            return Ok((WorkerReply::Written { next }, vec![file]));
        }
        WorkerRequest::FillGuest => {
            let file = File::from(fd.context("The guest memory is missing")?);
            guest_pieces::read(BufReader::new(file), |address, data| {
                function.fill_guest_memory(address, data).map_err(io::Error::other)
            })?;
        }
        WorkerRequest::Status { .. }
        | WorkerRequest::LogWrites { .. }
        | WorkerRequest::Scanout
        | WorkerRequest::Attach
        | WorkerRequest::BeginHandover
        | WorkerRequest::Adopt
        | WorkerRequest::AbandonHandover
        | WorkerRequest::Leave
        | WorkerRequest::Stop => bail!("This is no request about saving"),
    }
    Ok((WorkerReply::Done, Vec::new()))
}

/// Returns a file with guest memory that the vGPU has written, from an address on, and the address
/// from which there is more.
fn written(function: &mut VirtualFunction, from: u64) -> Result<(OwnedFd, Option<u64>)> {
    let mut to = BufWriter::new(File::from(file_of(c"guest-memory", &[])?));
    let (mut len, mut next) = (0, None);
    function.written(GuestPa(from), |address, data| {
        if len >= guest_pieces::BATCH {
            next = Some(address.0);
            return Ok(ControlFlow::Break(()));
        }
        len += data.len() as u64;
        guest_pieces::write(&mut to, address, data).map(ControlFlow::Continue)
    })?;
    let mut file = to.into_inner()?;
    file.rewind()?;
    Ok((file.into(), next))
}

fn video_memory(function: &mut VirtualFunction) -> Result<(MemoryRange, OwnedFd)> {
    let SavedMemory { aperture: Aperture { fd, offset, len }, staged } = function.saved_memory()?;
    Ok((MemoryRange { offset, len, staged }, fd))
}

#[cfg(test)]
mod tests {
    use mdev_core::device::FunctionSpec;
    use mdev_core::ids::VgpuId;
    use mdev_core::mem::DmaAccess;
    use mdev_core::testing::{Recorder, guest_ram};
    use mdev_core::units::MIB;

    use super::*;

    /// The manager refuses other parts: a worker that was compromised could pass no end of them.
    #[test]
    fn written_memory_comes_in_order_and_in_whole_parts() {
        const WRITTEN: u64 = 2 * guest_pieces::BATCH + 3 * MIB / 2;
        let (client, _record) = Recorder::new();
        let spec = FunctionSpec {
            vgpu: VgpuId::random(),
            type_name: "SOFT-1Q".into(),
            display: None,
            doorbell_mapped: true,
        };
        let mut function = VirtualFunction::new(&spec, client).unwrap();
        let (_ram, fd) = guest_ram(256 * MIB);
        let access = DmaAccess::READ | DmaAccess::WRITE;
        function.dma_map(GuestPa(0), 256 * MIB, access, Some((fd, 0))).unwrap();
        function.begin_write_log().unwrap();
        // The first parts begin in the midst of a range.
        for (at, len) in [(MIB / 2, WRITTEN - 4096), (250 * MIB, 4096)] {
            function.fill_guest_memory(GuestPa(at), &vec![7; len as usize]).unwrap();
        }
        let (mut from, mut parts) = (0, Vec::new());
        loop {
            let (file, next) = written(&mut function, from).unwrap();
            let mut len = 0;
            guest_pieces::read(File::from(file), |address, data| {
                assert!(address.0 >= from, "{address:?}");
                from = address.0 + data.len() as u64;
                len += data.len() as u64;
                Ok(())
            })
            .unwrap();
            parts.push(len);
            let Some(next) = next else { break };
            assert!(next >= from);
            from = next;
        }
        let whole = guest_pieces::BATCH;
        assert_eq!(parts, [whole, whole, WRITTEN - 2 * whole]);
    }
}
