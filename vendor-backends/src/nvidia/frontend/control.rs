//! Controls of objects (`NV_ESC_RM_CONTROL`).
//!
//! [`controls`] has what is done with each. What describes the vGPU is answered here, what changes
//! it becomes an operation of the vGPU, and queries about the GPU go to its driver, or else to
//! [`Recorded`](nvidia_rm::recording::Recorded). Everything else is refused.

use cuda_socket::FileId;
use mdev_core::gpu::{Client, GpuError};
use nvidia_rm::abi::{
    self, ActiveDevices, AddressSpaceType, BuildVersion, BusInfoV1, ClassEngine, ContextBufferSize,
    DrainState, GidInfo, GrInfoV1, IdInfo, IdInfoV1, NameString, P2pCaps, Pair, PciInfo,
    PreemptionMode, ShortNameString,
};
use nvidia_rm::controls::{self, Control as Handler};
use nvidia_rm::numbers::{class, fb, preemption, status};
use nvidia_rm::table::{Policy, find, label};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::NvidiaFrontEnd;
use super::call::{Call, Stop};
use super::identity::Identity;
use super::objects::Kind;

/// Maximum length of parameters, in bytes.
const MAX_PARAMS: usize = 32 << 10;

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
    /// Returns the parameters as a structure. In series with a shorter one, the rest is zero.
    pub fn read<T: FromBytes + IntoBytes>(&self) -> T {
        let mut value = T::new_zeroed();
        value.as_mut_bytes().iter_mut().zip(&self.params).for_each(|(to, from)| *to = *from);
        value
    }

    /// Replaces the start of the parameters, as far as they reach.
    pub fn write<T: IntoBytes + Immutable>(&mut self, value: &T) {
        self.params.iter_mut().zip(value.as_bytes()).for_each(|(to, from)| *to = *from);
    }
}

/// The parameters have the wrong length.
pub(super) const WRONG_LENGTH: Stop = Stop::Status(status::INVALID_PARAM_STRUCT);

impl NvidiaFrontEnd {
    /// Carries out `NV_ESC_RM_CONTROL`.
    pub(super) fn rm_control(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        let file = self.files.control_of(call.file())?;
        let argument: abi::Control = call.read()?;
        let abi::Control { client: root, object, command, params: address, .. } = argument;
        let len = argument.params_bytes as usize;
        self.clients.class_of(file, root, object)?;
        if len > MAX_PARAMS {
            self.refusals.note("control", label(controls::ROWS, command));
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
        let row = find(controls::ROWS, control.command);
        match row.map(|row| (row, row.policy)) {
            Some((_, Policy::Succeed(_))) => Ok(()),
            Some((_, Policy::Refuse(status, _))) => Err(Stop::Status(status)),
            Some((row, Policy::Answer(handler) | Policy::Operate(handler))) => {
                if row.shortest().is_some_and(|form| control.params.len() < form.bytes) {
                    return Err(WRONG_LENGTH);
                }
                self.handle(gpu, call, control, handler)
            }
            Some((_, Policy::Query)) | None => {
                match self.query(gpu, control.command, &mut control.params) {
                    Some(status::OK) => Ok(()),
                    Some(status) => Err(Stop::Status(status)),
                    None => {
                        let label = label(controls::ROWS, control.command);
                        self.refusals.note("control", label);
                        Err(Stop::Status(status::NOT_SUPPORTED))
                    }
                }
            }
        }
    }

    fn handle(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
        control: &mut Control,
        handler: Handler,
    ) -> Result<(), Stop> {
        match handler {
            Handler::BuildVersion => self.build_version(call, control),
            Handler::GpuIds => self.gpu_ids(control),
            Handler::ActiveDevices => {
                let mut active: ActiveDevices = control.read();
                active.count = 1;
                active.devices[0] = [self.identity.gpu_id(), u32::MAX, u32::MAX];
                control.write(&active);
            }
            Handler::IdInfoV1 => self.id_info_v1(control)?,
            Handler::IdInfo => self.id_info(control)?,
            Handler::PciInfo => {
                let PciInfo { gpu_id, .. } = control.read();
                self.check_gpu_id(gpu_id)?;
                let (bus, slot) = self.identity.address;
                control.write(&PciInfo { gpu_id, domain: 0, bus: bus.into(), slot: slot.into() });
            }
            Handler::DrainState => self.check_gpu_id(control.read::<DrainState>().gpu_id)?,
            Handler::AddressSpaceType => self.address_space_type(control)?,
            Handler::GrInfoV1 => {
                let GrInfoV1 { count, list, .. } = control.read();
                self.list_behind_pointer(gpu, call, controls::GR_INFO, (count, list))?;
            }
            Handler::BusInfoV1 => {
                let BusInfoV1 { count, list, .. } = control.read();
                self.list_behind_pointer(gpu, call, controls::BUS_INFO, (count, list))?;
            }
            Handler::TimeCorrelation => self.time_correlation(gpu, control)?,
            Handler::Pids => self.process_ids(control)?,
            Handler::PidInfo => self.process_info(control),
            Handler::StatusPagePoll => self.write_status_pages(),
            Handler::NameString => self.name(control)?,
            Handler::ShortName => {
                let mut text = [0; size_of::<ShortNameString>()];
                self.write_name(&mut text);
                control.write(&text);
            }
            Handler::GidInfo => self.gid(control),
            Handler::FbInfo => self.memory_info(gpu, control)?,
            Handler::ClassEngine => self.class_engine(control)?,
            Handler::Token => {
                let token = self.channel(control)?.token.0;
                control.write(&token);
            }
            Handler::ContextBufferSize => {
                let size: ContextBufferSize = control.read();
                control.write(&ContextBufferSize { bytes: CTX_BUFFER_BYTES, ..size });
            }
            Handler::ResetChannel => self.reset_channel(gpu, control)?,
            Handler::PerfBoost => {
                let clear = control.read::<Pair>().first & BOOST_COMMAND == 0;
                // The vGPU's boost ends with its last program.
                if !clear && let Some(programs) = gpu.programs() {
                    programs.boost_clocks(true)?;
                }
            }
            Handler::PreemptionMode => self.preemption_mode(gpu, control)?,
            Handler::ExceptionMask => self.watch_exceptions(gpu, control)?,
            Handler::ErrorStates => self.error_states(gpu, control)?,
            Handler::ClearErrorStates => self.clear_error_states(gpu, control)?,
            Handler::InheritedSharePolicy => self.share_client(control)?,
            Handler::P2pCaps => self.p2p_caps(control)?,
            Handler::NvlinkCaps => {
                // As of a GPU without links.
                control.params.fill(0);
            }
        }
        Ok(())
    }

    /// Answers a query by the GPU's driver, or as recorded.
    pub(super) fn query(
        &self,
        gpu: &mut dyn Client,
        command: u32,
        params: &mut [u8],
    ) -> Option<u32> {
        let answered = gpu.programs().and_then(|gpu| gpu.query_driver(command, params));
        answered.or_else(|| self.queries.query(command, params))
    }

    /// `NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE` of a group. libcuda asks for preemption of
    /// kernels at any instruction, once it has installed its trap handler.
    fn preemption_mode(&self, gpu: &mut dyn Client, control: &Control) -> Result<(), Stop> {
        let PreemptionMode { flags, object: group, compute, .. } = control.read();
        self.clients.object(control.file, control.root, group)?;
        if flags & preemption::SET_COMPUTE == 0 || compute != preemption::INSTRUCTIONS {
            return Ok(());
        }
        match self.clients.channel_of_group(control.root, group) {
            Some(channel) => match gpu.programs() {
                Some(programs) => Ok(programs.preempt_instructions(channel)?),
                None => Ok(()),
            },
            None => Err(Stop::Status(status::INVALID_STATE)),
        }
    }

    /// `NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS_V2` of a GPU with itself, which NCCL asks for: there is
    /// no way between GPUs.
    fn p2p_caps(&self, control: &mut Control) -> Result<(), Stop> {
        let mut params: P2pCaps = control.read();
        for id in params.gpus.iter().take(params.count as usize) {
            self.check_gpu_id(*id)?;
        }
        (params.caps, params.read_engines, params.write_engines) = (0, 0, 0);
        (params.states, params.pad0) = ([P2P_NOT_SUPPORTED; 9], [0; 3]);
        params.peers.fill(P2P_NO_PEER);
        params.egm_peers.fill(P2P_NO_PEER);
        control.write(&params);
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
    fn build_version(&self, call: &mut Call<'_>, control: &mut Control) {
        let BuildVersion { room, driver: first, version, title: last, .. } = control.read();
        let room = room as usize;
        let driver = &self.identity.driver;
        let title = format!("NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build");
        for (address, text) in
            [(first, driver.clone()), (version, format!("r{driver}")), (last, title)]
        {
            if address != 0 && room > 0 && room <= MAX_PARAMS {
                let mut bytes = text.into_bytes();
                bytes.truncate(room - 1);
                bytes.push(0);
                call.write_block(address, bytes);
            }
        }
    }

    /// Lists of ids, unused elements being all ones.
    fn gpu_ids(&self, control: &mut Control) {
        // The list of probed ids is followed by one of excluded ids, which is all ones too.
        control.params.iter_mut().take(ID_LIST_BYTES).for_each(|byte| *byte = 0xff);
        control.write(&self.identity.gpu_id());
    }

    fn id_info(&self, control: &mut Control) -> Result<(), Stop> {
        let gpu_id = control.read::<IdInfo>().gpu_id;
        self.check_gpu_id(gpu_id)?;
        control.write(&IdInfo {
            gpu_id,
            flags: u32::from(self.is_in_use()),
            sli_status: SLI_STATUS,
            board: gpu_id,
            instance: Identity::MINOR,
            numa_node: u32::MAX,
            ..Default::default()
        });
        Ok(())
    }

    fn id_info_v1(&self, control: &mut Control) -> Result<(), Stop> {
        let IdInfoV1 { gpu_id, name, .. } = control.read();
        self.check_gpu_id(gpu_id)?;
        control.write(&IdInfoV1 {
            gpu_id,
            flags: u32::from(self.is_in_use()),
            name,
            sli_status: SLI_STATUS,
            board: gpu_id,
            instance: Identity::MINOR,
            numa_node: u32::MAX,
            ..Default::default()
        });
        Ok(())
    }

    fn is_in_use(&self) -> bool {
        self.clients.all().any(|object| object.class == class::DEVICE)
    }

    /// `NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE`: asked before a CPU mapping.
    fn address_space_type(&self, control: &mut Control) -> Result<(), Stop> {
        let mut params: AddressSpaceType = control.read();
        let store = self.store(control.file, control.root, params.object)?;
        params.kind = if self.memories.is_doorbell(store) {
            ADDRESS_SPACE_REGISTERS
        } else {
            // The memory is made when the program maps it.
            self.memories.must_become_mappable(store)?;
            ADDRESS_SPACE_SYSTEM
        };
        control.write(&params);
        Ok(())
    }

    /// `NV2080_CTRL_CMD_GPU_GET_NAME_STRING`. The length of the name depends on the series.
    fn name(&self, control: &mut Control) -> Result<(), Stop> {
        let mut params: NameString = control.read();
        if params.flags != 0 {
            // UTF-16 was asked for.
            return Err(Stop::Status(status::NOT_SUPPORTED));
        }
        let len = control.params.len() - size_of_val(&params.flags);
        let len = len.min(params.text.len());
        self.write_name(&mut params.text[..len]);
        control.write(&params);
        Ok(())
    }

    fn write_name(&self, text: &mut [u8]) {
        text.fill(0);
        let name = self.identity.name.bytes().take(text.len() - 1);
        text.iter_mut().zip(name).for_each(|(target, byte)| *target = byte);
    }

    /// `NV2080_CTRL_CMD_GPU_GET_GID_INFO`, in its binary form or as text.
    fn gid(&self, control: &mut Control) {
        let mut info: GidInfo = control.read();
        let uuid = self.identity.vgpu.0;
        let text;
        let bytes: &[u8] = if info.flags & GID_FORMAT == GID_BINARY {
            uuid.as_bytes()
        } else {
            text = format!("GPU-{uuid}\0");
            text.as_bytes()
        };
        info.length = bytes.len() as u32;
        info.data[..bytes.len()].copy_from_slice(bytes);
        control.write(&info);
    }

    /// `NV2080_CTRL_CMD_FB_GET_INFO_V2`: the vGPU's memory instead of the GPU's.
    fn memory_info(&self, gpu: &mut dyn Client, control: &mut Control) -> Result<(), Stop> {
        let asked: abi::FbInfo = control.read();
        if self.query(gpu, control.command, &mut control.params) != Some(status::OK) {
            return Err(WRONG_LENGTH);
        }
        let (total, free) = (self.memories.video_bytes(), self.memories.free_video_bytes());
        let mut info: abi::FbInfo = control.read();
        let list = info.list.iter_mut().zip(asked.list).take(asked.count as usize);
        for ([_, data], [index, _]) in list {
            let bytes = match index {
                fb::RAM_SIZE | fb::TOTAL_RAM_SIZE | fb::HEAP_SIZE => total,
                fb::HEAP_FREE => free,
                _ => continue,
            };
            *data = u32::try_from(bytes >> 10).unwrap_or(u32::MAX);
        }
        control.write(&info);
        Ok(())
    }

    /// `NV906F_CTRL_GET_CLASS_ENGINEID`: the engine of an object of a channel.
    fn class_engine(&self, control: &mut Control) -> Result<(), Stop> {
        let mut params: ClassEngine = control.read();
        let object = self.clients.object(control.file, control.root, params.object)?;
        let Kind::Engine(engine) = object.kind else {
            return Err(Stop::Status(status::INVALID_OBJECT_HANDLE));
        };
        (params.class_engine, params.class, params.engine) = (object.class, object.class, engine);
        control.write(&params);
        Ok(())
    }

    /// `NV906F_CTRL_CMD_RESET_CHANNEL`: after an exception, libcuda resets its channel, and waits
    /// for the error. On GPUs without exceptions this ends the channel. A later channel may have
    /// the same id on the vGPU.
    fn reset_channel(&mut self, gpu: &mut dyn Client, control: &Control) -> Result<(), Stop> {
        let object = self.clients.object_mut(control.file, control.root, control.object)?;
        let Kind::Channel { handle, ended, .. } = &mut object.kind else {
            return Err(Stop::Status(status::INVALID_OBJECT_HANDLE));
        };
        if *ended {
            return Ok(());
        }
        let reset = gpu.require_programs().and_then(|gpu| gpu.reset_channel(handle.id));
        match reset {
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

/// `NV0000_P2P_CAPS_STATUS_NOT_SUPPORTED`.
const P2P_NOT_SUPPORTED: u8 = 5;
/// `NV0000_CTRL_SYSTEM_GET_P2P_CAPS_INVALID_PEER`.
const P2P_NO_PEER: u32 = u32::MAX;

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
