//! Ioctls of `/dev/nvidiactl` and `/dev/nvidiaN` other than allocations and controls.

use cuda_socket::Node;
use mdev_core::gpu::Client;
use nix::errno::Errno;

use super::FrontEnd;
use super::call::{Call, Stop};
use crate::nvidia::sys::abi::{AllocOsEvent, Free, MapMemory};
use crate::nvidia::sys::numbers::{escape, status};

/// Length of the version in the argument of `NV_ESC_CHECK_VERSION_STR`, in bytes.
const VERSION_BYTES: usize = 64;

/// Size of a block of memory that the host can plug, as the driver answers it, in bytes.
const MEMORY_BLOCK_BYTES: u32 = 1 << 30;

impl FrontEnd {
    /// Carries out an ioctl of a resource manager's file.
    pub(super) fn rm_ioctl(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        match call.request() & 0xff {
            escape::ALLOC => self.rm_alloc(gpu, call),
            escape::CONTROL => self.rm_control(gpu, call),
            escape::FREE => self.rm_free(gpu, call),
            escape::ALLOC_MEMORY => self.rm_alloc_memory(call),
            escape::MAP_MEMORY => self.rm_map_memory(call),
            escape::SHARE => self.rm_share(call),
            escape::DUP_OBJECT => self.rm_dup_object(call),
            // Nothing is mapped by address here.
            escape::UNMAP_MEMORY => call.set_u32(24, status::OK),
            escape::UPDATE_MAPPING => call.set_u32(32, status::OK),
            escape::CARD_INFO => {
                call.argument = self.identity.card_infos(call.argument.len());
                Ok(())
            }
            escape::REGISTER_FD => self.register_fd(call),
            escape::ALLOC_OS_EVENT | escape::FREE_OS_EVENT => self.os_event(call),
            escape::CHECK_VERSION => self.check_version(call),
            escape::SYS_PARAMS | escape::ATTACH_GPUS => Ok(()),
            escape::NUMA_INFO => {
                call.set_u32(0, u32::MAX)?;
                call.set_u32(8, MEMORY_BLOCK_BYTES)
            }
            escape::WAIT_OPEN => {
                call.set_u32(0, 0)?;
                call.set_u32(4, 0)
            }
            number => {
                self.refusals.note("ioctl", number);
                Err(Stop::INVALID)
            }
        }
    }

    fn rm_free(&mut self, gpu: &mut dyn Client, call: &mut Call<'_>) -> Result<(), Stop> {
        let Free { root, object, .. } = call.read()?;
        call.set_u32(12, status::OK)?;
        let file = self.files.control_of(call.file())?;
        // As the driver does: freeing an object that is gone is no error.
        let removed = match self.clients.remove(file, root, object) {
            Err(Stop::Status(status::OBJECT_NOT_FOUND)) => return Ok(()),
            removed => removed?,
        };
        self.dispose(gpu, removed);
        Ok(())
    }

    fn rm_map_memory(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        let mut argument: MapMemory = call.read()?;
        let file = self.files.control_of(call.file())?;
        let store = self.store(file, argument.client, argument.memory)?;
        let target = call.file_of(argument.fd)?;
        self.files.get(target)?;
        let end = argument.offset.checked_add(argument.length);
        if end.is_none_or(|end| self.memories.len(store).is_ok_and(|len| end > len)) {
            return Err(Stop::Status(status::INVALID_ARGUMENT));
        }
        if self.memories.must_become_mappable(store)? {
            let memory = call.new_memory(self.memories.len(store)?)?;
            self.memories.make_mappable(store, memory)?;
        }
        self.files.get_mut(target)?.mapped = Some(store);
        argument.flags |= map_flag::DEFAULT_CACHING;
        if !self.memories.is_doorbell(store) {
            argument.flags |= map_flag::DIRECT;
        }
        (argument.status, argument.linear) = (status::OK, argument.offset);
        call.write(&argument)
    }

    fn register_fd(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        let control = call.file_of(call.u32(0)?.cast_signed())?;
        let is_control = self.files.get(control)?.node == Node::Control;
        let file = self.files.get_mut(call.file())?;
        if !is_control || !matches!(file.node, Node::Gpu(_)) {
            return Err(Stop::INVALID);
        }
        if file.control.is_some_and(|attached| attached != control) {
            return Err(Stop::INVALID);
        }
        file.control = Some(control);
        Ok(())
    }

    fn os_event(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        let argument: AllocOsEvent = call.read()?;
        let file = self.files.control_of(call.file())?;
        self.clients.check(file, argument.client)?;
        call.set_u32(12, status::OK)
    }

    /// Compares versions, as the driver does: its libraries must have its own version.
    fn check_version(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        const QUERY: u32 = b'2' as u32;
        let command = call.u32(0)?;
        let text = call.argument.get_mut(8..8 + VERSION_BYTES).ok_or(Stop::INVALID)?;
        let driver = self.identity.driver.as_bytes();
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(VERSION_BYTES);
        let same = text[..end] == *driver;
        text.fill(0);
        text.iter_mut().zip(driver).for_each(|(target, byte)| *target = *byte);
        call.set_u32(4, u32::from(same))?;
        if same || command == QUERY { Ok(()) } else { Err(Stop::Errno(Errno::EINVAL)) }
    }
}

/// Flags of CPU mappings (`NVOS33_FLAGS_*`), as the driver answers them.
mod map_flag {
    /// `CACHING_TYPE_DEFAULT`.
    pub const DEFAULT_CACHING: u32 = 6 << 23;
    /// `MAPPING_DIRECT`.
    pub const DIRECT: u32 = 1 << 15;
}

/// Sets the resource manager's status in the argument of an ioctl.
pub fn set_status(call: &mut Call<'_>, status: u32) -> Result<(), Stop> {
    let at = match call.request() & 0xff {
        escape::FREE | escape::ALLOC_OS_EVENT | escape::FREE_OS_EVENT => 12,
        escape::ALLOC if call.argument.len() >= 48 => 40,
        escape::ALLOC | escape::CONTROL => 28,
        escape::ALLOC_MEMORY | escape::MAP_MEMORY => 40,
        escape::SHARE => 20,
        escape::DUP_OBJECT => 24,
        _ => return Err(Stop::INVALID),
    };
    call.set_u32(at, status)
}
