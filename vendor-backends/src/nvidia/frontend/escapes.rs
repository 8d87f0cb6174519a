//! Ioctls of `/dev/nvidiactl` and `/dev/nvidiaN` other than allocations and controls.

use cuda_socket::Node;
use mdev_core::gpu::Client;
use nix::errno::Errno;
use nvidia_rm::abi::{AllocOsEvent, Free, MapMemory, NumaInfo, RegisterFd, RmApiVersion, WaitOpen};
use nvidia_rm::escapes::{self, Escape};
use nvidia_rm::numbers::status;
use nvidia_rm::table::{Form, find};

use super::NvidiaFrontEnd;
use super::call::{Call, Stop};

/// Size of a block of memory that the host can plug, as the driver answers it, in bytes.
const MEMORY_BLOCK_BYTES: u64 = 1 << 30;

/// Number of an ioctl of a resource manager's file.
fn number(call: &Call<'_>) -> u32 {
    call.request() & 0xff
}

/// Returns the form of the argument of an ioctl.
pub fn form(call: &Call<'_>) -> Option<&'static Form> {
    find(escapes::ROWS, number(call))?.form_within(call.argument.len())
}

impl NvidiaFrontEnd {
    /// Carries out an ioctl of a resource manager's file.
    pub(super) fn rm_ioctl(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        let row = find(escapes::ROWS, number(call));
        if row.is_some_and(|row| !row.forms.is_empty()) && form(call).is_none() {
            return Err(Stop::INVALID);
        }
        let request = ("ioctl", number(call));
        let Some(handler) = self.refusals.handler(escapes::ROWS, request, Stop::INVALID)? else {
            return Ok(());
        };
        match handler {
            Escape::Alloc => self.rm_alloc(gpu, call),
            Escape::Control => self.rm_control(gpu, call),
            Escape::Free => self.rm_free(gpu, call),
            Escape::AllocMemory => self.rm_alloc_memory(call),
            Escape::MapMemory => self.rm_map_memory(call),
            Escape::Share => self.rm_share(call),
            Escape::DupObject => self.rm_dup_object(call),
            Escape::CardInfo => {
                call.argument = self.identity.card_infos(call.argument.len());
                Ok(())
            }
            Escape::RegisterFd => self.register_fd(call),
            Escape::OsEvent => self.os_event(call),
            Escape::CheckVersion => self.check_version(call),
            Escape::NumaInfo => call.change(|info: &mut NumaInfo| {
                (info.node, info.block_bytes) = (-1, MEMORY_BLOCK_BYTES);
            }),
            Escape::WaitOpen => call.write(&WaitOpen::default()),
        }
    }

    fn rm_free(&mut self, gpu: &mut dyn Client, call: &mut Call<'_>) -> Result<(), Stop> {
        let Free { root, object, .. } = call.read()?;
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
            self.memories.make_mappable(self.owner(file)?, store, memory)?;
        }
        // Another program's mapping would show all of the owner's memory in the file.
        if !self.memories.may_map(store, |owner| owner == file)? {
            return Err(Stop::Status(status::INSUFFICIENT_PERMISSIONS));
        }
        self.files.get_mut(target)?.mapped = Some(store);
        argument.flags |= map_flag::DEFAULT_CACHING;
        if !self.memories.is_doorbell(store) {
            argument.flags |= map_flag::DIRECT;
        }
        argument.linear = argument.offset;
        call.write(&argument)
    }

    fn register_fd(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        let control = call.file_of(call.read::<RegisterFd>()?.control)?;
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
        self.clients.check(file, argument.client)
    }

    /// Compares versions, as the driver does: its libraries must have its own version.
    fn check_version(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        const QUERY: u32 = b'2' as u32;
        let mut argument: RmApiVersion = call.read()?;
        let driver = self.identity.driver.as_bytes();
        let text = &mut argument.version;
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        let same = text[..end] == *driver;
        text.fill(0);
        text.iter_mut().zip(driver).for_each(|(target, byte)| *target = *byte);
        argument.reply = u32::from(same);
        call.write(&argument)?;
        if same || argument.command == QUERY { Ok(()) } else { Err(Stop::Errno(Errno::EINVAL)) }
    }
}

/// Flags of CPU mappings (`NVOS33_FLAGS_*`), as the driver answers them.
mod map_flag {
    /// `CACHING_TYPE_DEFAULT`.
    pub const DEFAULT_CACHING: u32 = 6 << 23;
    /// `MAPPING_DIRECT`.
    pub const DIRECT: u32 = 1 << 15;
}
