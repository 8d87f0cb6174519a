//! Controls of objects (`NV_ESC_RM_CONTROL`).
//!
//! What describes the vGPU is answered here, what changes it becomes an operation of the vGPU, and
//! queries about the GPU go to its driver, or else to [`Recorded`](super::queries::Recorded).
//! Everything else is refused.

use cuda_socket::FileId;
use mdev_core::gpu::{Client, GpuError};

use super::FrontEnd;
use super::call::{Call, Stop, get_u32, get_u64, put_u32, put_u64};
use super::identity::Identity;
use super::objects::Kind;
use crate::nvidia::sys::numbers::{class, control, fb, preemption, status};

/// Maximum length of parameters, in bytes.
const MAX_PARAMS: usize = 32 << 10;

/// Changes that a vGPU accepts and that have no effect on it: the scheduler sets its time slices, the
/// driver's watchdog and clocks are the host's, and an emulated GPU is always attached.
const WITHOUT_EFFECT: &[u32] = &[
    control::ATTACH_IDS,
    control::DETACH_IDS,
    control::ASYNC_ATTACH_ID,
    control::INHERITED_SHARE_POLICY,
    control::CUDA_LIMIT,
    control::CHANNEL_LIST,
    // libcuda asks for it while it waits for long, and stops waiting if it is refused.
    control::SERVICE_INTERRUPTS,
    control::RELEASE_WATCHDOG,
    control::DISABLE_WATCHDOG,
    control::UNNAMED_2080_0145,
    control::UNNAMED_2080_0146,
    control::UNNAMED_2080_018B,
    control::UNNAMED_0080_028B,
    control::SET_TIMESLICE,
    control::SCHEDULE,
    control::SCHEDULE_CHANNEL,
    control::BIND_CHANNEL,
    control::P2P_REGISTER_SPACE,
    control::P2P_REGISTER_MEMORY,
    control::P2P_UNREGISTER_MEMORY,
    control::P2P_CAPS_MATRIX,
];

/// Queries of sensors. Temperature and power are the host's, and vGPUs have none.
const SENSORS: &[u32] = &[
    control::THERMAL_SYSTEM,
    control::UNNAMED_2080_852F,
    control::UNNAMED_2080_A613,
    control::UNNAMED_2080_A61F,
];

/// A control in progress.
#[derive(Debug)]
pub(super) struct Control {
    /// Control file of the program.
    pub file: FileId,
    /// Client.
    pub root: u32,
    /// Object.
    pub object: u32,
    command: u32,
    /// Parameters, as the program gets them back.
    pub params: Vec<u8>,
}

impl Control {
    /// Returns 32 bits of the parameters.
    pub fn u32(&self, at: usize) -> Result<u32, Stop> {
        get_u32(&self.params, at).ok_or(WRONG_LENGTH)
    }

    fn set(&mut self, at: usize, value: u32) -> Result<(), Stop> {
        put_u32(&mut self.params, at, value).ok_or(WRONG_LENGTH)
    }
}

/// The parameters have the wrong length.
pub(super) const WRONG_LENGTH: Stop = Stop::Status(status::INVALID_PARAM_STRUCT);

impl FrontEnd {
    /// Carries out `NV_ESC_RM_CONTROL`.
    pub(super) fn rm_control(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        let file = self.files.control_of(call.file())?;
        let (root, object, command) = (call.u32(0)?, call.u32(4)?, call.u32(8)?);
        let (address, len) = (call.u64(16)?, call.u32(24)? as usize);
        call.set_u32(28, status::OK)?;
        self.clients.class_of(file, root, object)?;
        if len > MAX_PARAMS {
            self.refusals.note("control", command);
            return Err(Stop::Status(status::NOT_SUPPORTED));
        }
        let params = if len == 0 { Vec::new() } else { call.block(address, len)? };
        let before = params.clone();
        let mut control = Control { file, root, object, command, params };
        let result = self.answer(gpu, call, &mut control);
        if control.params != before {
            call.write_block(address, control.params);
        }
        result
    }

    fn answer(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
        control: &mut Control,
    ) -> Result<(), Stop> {
        match control.command {
            command if WITHOUT_EFFECT.contains(&command) => Ok(()),
            control::BUILD_VERSION => self.build_version(call, control),
            control::ATTACHED_IDS | control::PROBED_IDS => self.gpu_ids(control),
            control::ACTIVE_DEVICES => {
                control.set(0, 1)?;
                control.set(4, self.identity.gpu_id())?;
                control.set(8, u32::MAX)?;
                control.set(12, u32::MAX)
            }
            control::ID_INFO_V1 => self.id_info(control, &ID_INFO_V1),
            control::ID_INFO => self.id_info(control, &ID_INFO_V2),
            control::PCI_INFO => {
                self.check_gpu_id(control.u32(0)?)?;
                control.set(4, 0)?;
                let (bus, slot) = self.identity.address;
                control.set(8, u32::from(bus) | u32::from(slot) << 16)
            }
            control::DRAIN_STATE => self.check_gpu_id(control.u32(0)?),
            control::ADDRESS_SPACE_TYPE => self.address_space_type(control),
            control::GR_INFO_V1 => {
                self.list_behind_pointer(gpu, call, control::GR_INFO, &control.params)
            }
            control::BUS_INFO_V1 => {
                self.list_behind_pointer(gpu, call, control::BUS_INFO, &control.params)
            }
            control::TIME_CORRELATION => self.time_correlation(gpu, &mut control.params),
            control::PIDS => self.process_ids(&mut control.params),
            control::PID_INFO => self.process_info(&mut control.params),
            control::STATUS_PAGE_POLL => {
                self.write_status_pages();
                Ok(())
            }
            control::NAME_STRING => self.name(control, 4, 128),
            control::SHORT_NAME_STRING => self.name(control, 0, 64),
            control::GID_INFO => self.gid(control),
            control::FB_INFO => self.memory_info(gpu, control),
            control::CLASS_ENGINE | control::CLASS_ENGINE_550 => self.class_engine(control),
            control::TOKEN => {
                let token = self.channel(control)?.token.0;
                control.set(0, token)
            }
            control::CTX_BUFFER_SIZE => {
                put_u64(&mut control.params, 8, CTX_BUFFER_BYTES).ok_or(WRONG_LENGTH)
            }
            control::RESET_CHANNEL => self.reset_channel(gpu, control),
            control::PERF_BOOST => {
                let clear = control.u32(0)? & BOOST_COMMAND == 0;
                // The vGPU's boost ends with its last program.
                if clear { Ok(()) } else { Ok(gpu.boost_clocks(true)?) }
            }
            control::PREEMPTION_MODE => self.preemption_mode(gpu, control),
            control::EXCEPTION_MASK => self.watch_exceptions(gpu, control),
            control::ERROR_STATES => self.error_states(gpu, control),
            control::CLEAR_ERROR_STATES => self.clear_error_states(gpu, control),
            control::P2P_CAPS => self.p2p_caps(control),
            control::NVLINK_CAPS => {
                // As of a GPU without links.
                control.params.fill(0);
                Ok(())
            }
            command if SENSORS.contains(&command) => Err(Stop::Status(status::NOT_SUPPORTED)),
            command => match self.query(gpu, command, &mut control.params) {
                Some(status::OK) => Ok(()),
                Some(status) => Err(Stop::Status(status)),
                None => {
                    self.refusals.note("control", command);
                    Err(Stop::Status(status::NOT_SUPPORTED))
                }
            },
        }
    }

    /// Answers a query by the GPU's driver, or as recorded.
    pub(super) fn query(
        &self,
        gpu: &mut dyn Client,
        command: u32,
        params: &mut [u8],
    ) -> Option<u32> {
        gpu.query_driver(command, params).or_else(|| self.queries.query(command, params))
    }

    /// `NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE` of a group. libcuda asks for preemption of
    /// kernels at any instruction, once it has installed its trap handler.
    fn preemption_mode(&self, gpu: &mut dyn Client, control: &Control) -> Result<(), Stop> {
        let group = control.u32(4)?;
        self.clients.object(control.file, control.root, group)?;
        if control.u32(0)? & preemption::SET_COMPUTE == 0
            || control.u32(12)? != preemption::INSTRUCTIONS
        {
            return Ok(());
        }
        match self.clients.channel_of_group(control.root, group) {
            Some(channel) => Ok(gpu.preempt_instructions(channel)?),
            None => Err(Stop::Status(status::INVALID_STATE)),
        }
    }

    /// `NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS_V2` of a GPU with itself, which NCCL asks for: there is
    /// no way between GPUs.
    fn p2p_caps(&self, control: &mut Control) -> Result<(), Stop> {
        for index in 0..control.u32(p2p::COUNT)?.min(p2p::MAX_GPUS) as usize {
            self.check_gpu_id(control.u32(index * 4)?)?;
        }
        let answer = control.params.get_mut(p2p::CAPS..).ok_or(WRONG_LENGTH)?;
        if answer.len() < p2p::PEERS - p2p::CAPS {
            return Err(WRONG_LENGTH);
        }
        let (caps, peers) = answer.split_at_mut(p2p::PEERS - p2p::CAPS);
        caps.fill(0);
        let states = p2p::STATES - p2p::CAPS;
        caps[states..states + p2p::STATE_COUNT].fill(p2p::NOT_SUPPORTED);
        // `NV0000_CTRL_SYSTEM_GET_P2P_CAPS_INVALID_PEER`.
        peers.fill(0xff);
        Ok(())
    }

    fn check_gpu_id(&self, id: u32) -> Result<(), Stop> {
        if id == self.identity.gpu_id() {
            Ok(())
        } else {
            Err(Stop::Status(status::INVALID_ARGUMENT))
        }
    }

    /// `NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION`: strings behind three pointers.
    fn build_version(&self, call: &mut Call<'_>, control: &mut Control) -> Result<(), Stop> {
        let room = control.u32(0)? as usize;
        let driver = &self.identity.driver;
        let title = format!("NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build");
        for (at, text) in [(8, driver.clone()), (16, format!("r{driver}")), (24, title)] {
            let address = get_u64(&control.params, at).ok_or(WRONG_LENGTH)?;
            if address != 0 && room > 0 && room <= MAX_PARAMS {
                let mut bytes = text.into_bytes();
                bytes.truncate(room - 1);
                bytes.push(0);
                call.write_block(address, bytes);
            }
        }
        Ok(())
    }

    /// Lists of ids, unused elements being all ones.
    fn gpu_ids(&self, control: &mut Control) -> Result<(), Stop> {
        // The list of probed ids is followed by one of excluded ids, which is all ones too.
        control.params.iter_mut().take(ID_LIST_BYTES).for_each(|byte| *byte = 0xff);
        control.set(0, self.identity.gpu_id())
    }

    fn id_info(&self, control: &mut Control, at: &IdInfo) -> Result<(), Stop> {
        self.check_gpu_id(control.u32(0)?)?;
        let in_use = self.clients.all().any(|object| object.class == class::DEVICE);
        control.set(4, u32::from(in_use))?;
        control.set(8, 0)?;
        control.set(12, 0)?;
        control.set(at.sli, SLI_STATUS)?;
        control.set(at.board, self.identity.gpu_id())?;
        control.set(at.instance, Identity::MINOR)?;
        control.set(at.numa, u32::MAX)
    }

    /// `NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE`: asked before a CPU mapping.
    fn address_space_type(&self, control: &mut Control) -> Result<(), Stop> {
        let store = self.store(control.file, control.root, control.u32(0)?)?;
        let kind = if self.memories.is_doorbell(store) {
            ADDRESS_SPACE_REGISTERS
        } else {
            // The memory is made when the program maps it.
            self.memories.must_become_mappable(store)?;
            ADDRESS_SPACE_SYSTEM
        };
        control.set(8, kind)
    }

    fn name(&self, control: &mut Control, at: usize, len: usize) -> Result<(), Stop> {
        if at > 0 && control.u32(0)? != 0 {
            // UTF-16 was asked for.
            return Err(Stop::Status(status::NOT_SUPPORTED));
        }
        let target = control.params.get_mut(at..at + len).ok_or(WRONG_LENGTH)?;
        target.fill(0);
        let name = self.identity.name.bytes().take(len - 1);
        target.iter_mut().zip(name).for_each(|(target, byte)| *target = byte);
        Ok(())
    }

    /// `NV2080_CTRL_CMD_GPU_GET_GID_INFO`, in its binary form.
    fn gid(&self, control: &mut Control) -> Result<(), Stop> {
        let uuid = self.identity.vgpu.0;
        let text;
        let bytes: &[u8] = if control.u32(4)? & GID_FORMAT == GID_BINARY {
            uuid.as_bytes()
        } else {
            text = format!("GPU-{uuid}\0");
            text.as_bytes()
        };
        control.set(8, bytes.len() as u32)?;
        let target = control.params.get_mut(12..12 + bytes.len()).ok_or(WRONG_LENGTH)?;
        target.copy_from_slice(bytes);
        Ok(())
    }

    /// `NV2080_CTRL_CMD_FB_GET_INFO_V2`: the vGPU's memory instead of the GPU's.
    fn memory_info(&self, gpu: &mut dyn Client, control: &mut Control) -> Result<(), Stop> {
        let asked = control.params.clone();
        if self.query(gpu, control.command, &mut control.params) != Some(status::OK) {
            return Err(WRONG_LENGTH);
        }
        let (total, free) = (self.memories.video_bytes(), self.memories.free_video_bytes());
        let count = get_u32(&asked, 0).unwrap_or(0) as usize;
        for at in (0..count).map_while(|index| index.checked_mul(8)?.checked_add(4)) {
            let bytes = match get_u32(&asked, at) {
                None => break,
                Some(fb::RAM_SIZE | fb::TOTAL_RAM_SIZE | fb::HEAP_SIZE) => total,
                Some(fb::HEAP_FREE) => free,
                Some(_) => continue,
            };
            control.set(at + 4, u32::try_from(bytes >> 10).unwrap_or(u32::MAX))?;
        }
        Ok(())
    }

    /// `NV906F_CTRL_GET_CLASS_ENGINEID`: the engine of an object of a channel.
    fn class_engine(&self, control: &mut Control) -> Result<(), Stop> {
        let handle = control.u32(0)?;
        let object = self.clients.object(control.file, control.root, handle)?;
        let Kind::Engine(engine) = object.kind else {
            return Err(Stop::Status(status::INVALID_OBJECT_HANDLE));
        };
        let class = object.class;
        control.set(4, class)?;
        control.set(8, class)?;
        control.set(12, engine)
    }

    /// `NV906F_CTRL_CMD_RESET_CHANNEL`: after an exception, libcuda resets its channel, and waits for
    /// the error. On GPUs without exceptions this ends the channel. A later channel may have the same
    /// id on the vGPU.
    fn reset_channel(&mut self, gpu: &mut dyn Client, control: &Control) -> Result<(), Stop> {
        let object = self.clients.object_mut(control.file, control.root, control.object)?;
        let Kind::Channel { handle, ended, .. } = &mut object.kind else {
            return Err(Stop::Status(status::INVALID_OBJECT_HANDLE));
        };
        if *ended {
            return Ok(());
        }
        match gpu.reset_channel(handle.id) {
            Err(GpuError::Unsupported(_)) => {
                gpu.destroy_channel(handle.id)?;
                *ended = true;
                Ok(())
            }
            done => Ok(done?),
        }
    }

    fn channel(&self, control: &Control) -> Result<mdev_core::gpu::ChannelHandle, Stop> {
        match self.clients.object(control.file, control.root, control.object)?.kind {
            Kind::Channel { handle, .. } => Ok(handle),
            _ => Err(Stop::Status(status::INVALID_OBJECT_HANDLE)),
        }
    }
}

/// Length of the lists of GPUs' ids that are all ones, in bytes.
const ID_LIST_BYTES: usize = 256;

/// Size that a channel's context buffers have, in bytes. Programs only reserve addresses for them.
const CTX_BUFFER_BYTES: u64 = 0x50_2000;

/// Offsets in the parameters of `NV0000_CTRL_CMD_GPU_GET_ID_INFO` and its second version.
#[derive(Debug)]
struct IdInfo {
    sli: usize,
    board: usize,
    instance: usize,
    numa: usize,
}

const ID_INFO_V1: IdInfo = IdInfo { sli: 24, board: 28, instance: 32, numa: 36 };
const ID_INFO_V2: IdInfo = IdInfo { sli: 16, board: 20, instance: 24, numa: 28 };

/// `NV0000_CTRL_SYSTEM_GET_P2P_CAPS_V2_PARAMS`.
mod p2p {
    /// Maximum number of ids of GPUs, which come first.
    pub const MAX_GPUS: u32 = 32;
    /// Offset of the number of ids.
    pub const COUNT: usize = 128;
    /// Offset of the capabilities and the numbers of copy engines.
    pub const CAPS: usize = 132;
    /// Offset and number of the states of capabilities.
    pub const STATES: usize = 144;
    pub const STATE_COUNT: usize = 9;
    /// Offset of the numbers of peers.
    pub const PEERS: usize = 156;
    /// `NV0000_P2P_CAPS_STATUS_NOT_SUPPORTED`.
    pub const NOT_SUPPORTED: u8 = 5;
}

/// `NV0000_CTRL_SLI_STATUS_GPU_NOT_SUPPORTED`, and that a GPU has no partner.
const SLI_STATUS: u32 = 0x41;

/// `NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE_SYSMEM`.
const ADDRESS_SPACE_SYSTEM: u32 = 1;
/// `NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE_REGMEM`.
const ADDRESS_SPACE_REGISTERS: u32 = 3;

/// `NV2080_CTRL_PERF_BOOST_FLAGS_CMD`.
const BOOST_COMMAND: u32 = 3;

/// `NV2080_GPU_CMD_GPU_GET_GID_FLAGS_FORMAT`.
const GID_FORMAT: u32 = 2;
/// `NV2080_GPU_CMD_GPU_GET_GID_FLAGS_FORMAT_BINARY`.
const GID_BINARY: u32 = 2;
