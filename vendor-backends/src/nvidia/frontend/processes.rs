//! Processes on the vGPU, as NVML asks for them.

use std::collections::{BTreeMap, BTreeSet};

use cuda_socket::FileId;

use super::FrontEnd;
use super::call::{Stop, get_u32, put_u32, put_u64};
use super::control::WRONG_LENGTH;
use super::objects::Kind;
use crate::nvidia::sys::numbers::status;

/// `NV2080_CTRL_GPU_GET_PIDS_PARAMS`.
mod pids {
    /// Offset of the class that the processes' objects have.
    pub const CLASS: usize = 4;
    pub const COUNT: usize = 8;
    pub const FIRST: usize = 12;
    pub const MAX: usize = 950;
    /// Kind of query: by class.
    pub const BY_CLASS: u32 = 0;
}

/// `NV2080_CTRL_GPU_GET_PID_INFO_PARAMS`.
mod pid_info {
    pub const FIRST: usize = 8;
    pub const LEN: usize = 72;
    /// Offsets in an element: kind of information, status, and bytes of video memory.
    pub const INDEX: usize = 4;
    pub const STATUS: usize = 8;
    pub const BYTES: usize = 16;
    /// Kind of information: video memory.
    pub const VIDEO_MEMORY: u32 = 0;
}

impl FrontEnd {
    fn process_of(&self, file: FileId) -> Option<i32> {
        self.files.get(file).ok().map(|file| file.process)
    }

    /// Returns the processes that have an object of a class.
    fn processes_with(&self, class: u32) -> BTreeSet<i32> {
        let objects = self.clients.with_files().filter(|(_, object)| object.class == class);
        objects.filter_map(|(file, _)| self.process_of(file)).collect()
    }

    /// Returns the bytes of video memory of each process that has memory objects.
    pub fn video_bytes_by_process(&self) -> BTreeMap<i32, u64> {
        let mut bytes = BTreeMap::new();
        for (file, object) in self.clients.with_files() {
            if let Kind::Memory(store) = object.kind
                && let Some(process) = self.process_of(file)
            {
                *bytes.entry(process).or_default() += self.memories.video_len(store);
            }
        }
        bytes
    }

    /// `NV2080_CTRL_CMD_GPU_GET_PIDS`.
    pub(super) fn process_ids(&self, params: &mut [u8]) -> Result<(), Stop> {
        if get_u32(params, 0) != Some(pids::BY_CLASS) {
            return Err(Stop::Status(status::INVALID_ARGUMENT));
        }
        let class = get_u32(params, pids::CLASS).ok_or(WRONG_LENGTH)?;
        let found = self.processes_with(class);
        let mut count = 0;
        for (at, pid) in found.into_iter().take(pids::MAX).enumerate() {
            put_u32(params, pids::FIRST + 4 * at, pid.cast_unsigned()).ok_or(WRONG_LENGTH)?;
            count += 1;
        }
        put_u32(params, pids::COUNT, count).ok_or(WRONG_LENGTH)
    }

    /// `NV2080_CTRL_CMD_GPU_GET_PID_INFO`.
    pub(super) fn process_info(&self, params: &mut [u8]) -> Result<(), Stop> {
        let count = get_u32(params, 0).ok_or(WRONG_LENGTH)? as usize;
        let elements = params.get_mut(pid_info::FIRST..).ok_or(WRONG_LENGTH)?;
        let used = self.video_bytes_by_process();
        for element in elements.chunks_exact_mut(pid_info::LEN).take(count) {
            let (Some(pid), Some(index)) = (get_u32(element, 0), get_u32(element, pid_info::INDEX))
            else {
                return Err(WRONG_LENGTH);
            };
            if index == pid_info::VIDEO_MEMORY {
                let bytes = used.get(&pid.cast_signed()).copied().unwrap_or(0);
                put_u64(element, pid_info::BYTES, bytes).ok_or(WRONG_LENGTH)?;
                put_u32(element, pid_info::STATUS, status::OK).ok_or(WRONG_LENGTH)?;
            } else {
                let status = status::INVALID_ARGUMENT;
                put_u32(element, pid_info::STATUS, status).ok_or(WRONG_LENGTH)?;
            }
        }
        Ok(())
    }
}
