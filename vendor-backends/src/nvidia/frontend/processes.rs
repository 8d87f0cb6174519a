//! Processes on the vGPU, as NVML asks for them.

use std::collections::{BTreeMap, BTreeSet};

use cuda_socket::FileId;
use nvidia_rm::abi::{PidInfos, Pids};
use nvidia_rm::numbers::status;

use super::NvidiaFrontEnd;
use super::call::Stop;
use super::control::Control;
use super::objects::Kind;

/// `NV2080_CTRL_GPU_GET_PIDS_ID_TYPE_CLASS`: processes are asked for by a class.
const BY_CLASS: u32 = 0;

/// `NV2080_CTRL_GPU_PID_INFO_INDEX_VIDEO_MEMORY_USAGE`.
const VIDEO_MEMORY: u32 = 0;

impl NvidiaFrontEnd {
    fn process_of(&self, file: FileId) -> Option<i32> {
        self.files.get(file).ok().map(|file| file.opener.process)
    }

    /// Returns the processes that have an object of a class.
    fn processes_with(&self, class: u32) -> BTreeSet<i32> {
        let objects = self.clients.with_files().filter(|(_, object)| object.class == class);
        objects.filter_map(|(file, _)| self.process_of(file)).collect()
    }

    /// Returns the bytes of video memory of each process that has memory objects.
    pub(super) fn bytes_by_process(&self) -> BTreeMap<i32, u64> {
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
    pub(super) fn process_ids(&self, control: &mut Control) -> Result<(), Stop> {
        let mut params: Pids = control.read();
        if params.kind != BY_CLASS {
            return Err(Stop::Status(status::INVALID_ARGUMENT));
        }
        let found = self.processes_with(params.class);
        params.count = found.len().min(params.pids.len()) as u32;
        params.pids.iter_mut().zip(found).for_each(|(to, pid)| *to = pid.cast_unsigned());
        control.write(&params);
        Ok(())
    }

    /// `NV2080_CTRL_CMD_GPU_GET_PID_INFO`.
    pub(super) fn process_info(&self, control: &mut Control) {
        let used = self.bytes_by_process();
        let mut params: PidInfos = control.read();
        for process in params.list.iter_mut().take(params.count as usize) {
            if process.index == VIDEO_MEMORY {
                process.bytes = used.get(&process.pid.cast_signed()).copied().unwrap_or(0);
                process.status = status::OK;
            } else {
                process.status = status::INVALID_ARGUMENT;
            }
        }
        control.write(&params);
    }
}
