//! Arguments of ioctls.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Call;
use crate::escapes;

structures! {
    /// `nv_ioctl_card_info_t`.
    CardInfo {
        valid: u8, pad0: [u8; 3], pci_domain: u32, pci_bus: u8, pci_slot: u8, pci_function: u8,
        pad1: u8, pci_vendor: u16, pci_device: u16, gpu_id: u32, interrupt_line: u16, pad2: [u8; 2],
        reg_address: u64, reg_size: u64, fb_address: u64, fb_size: u64, minor: u32,
        dev_name: [u8; 10], pad3: [u8; 2],
    }

    /// Argument of `NV_ESC_CARD_INFO`.
    CardInfos { cards: [CardInfo; MAX_CARDS] }

    /// `nv_ioctl_register_fd_t`: attaches a GPU's descriptor to a control descriptor.
    RegisterFd { control: i32 }

    /// `nv_ioctl_alloc_os_event_t`.
    AllocOsEvent { client: u32, device: u32, fd: u32, status: u32 }

    /// `NVOS41_PARAMETERS`: takes an event with data from an event's descriptor.
    GetEventData { event: u64, more: u32, status: u32 }

    /// `NvUnixEvent`: event with data. `object` is the event's handle.
    EventData { object: u32, index: u32, info32: u32, info16: u32 }

    /// `NvNotification`: report of a channel's error. `status` is 0xffff after an error.
    Notification { pad0: [u32; 2], info32: u32, info16: u16, status: u16 }

    /// `NVOS00_PARAMETERS`: frees an object and its children.
    Free { root: u32, parent: u32, object: u32, status: u32 }

    /// `NVOS21_PARAMETERS`: allocates an object.
    Alloc {
        root: u32, parent: u32, object: u32, class: u32, params: u64, params_bytes: u32,
        status: u32,
    }

    /// `NVOS54_PARAMETERS`: calls a control of an object.
    Control {
        client: u32, object: u32, command: u32, flags: u32, params: u64, params_bytes: u32,
        status: u32,
    }

    /// `nv_ioctl_nvos02_parameters_with_fd`: creates a memory object from pages of the caller.
    AllocMemory {
        root: u32, parent: u32, object: u32, class: u32, flags: u32, pad0: u32, memory: u64,
        limit: u64, status: u32, pad1: u32, fd: i32, pad2: u32,
    }

    /// `nv_ioctl_nvos33_parameters_with_fd`: prepares a descriptor for `mmap` of a memory object.
    MapMemory {
        client: u32, device: u32, memory: u32, pad0: u32, offset: u64, length: u64, linear: u64,
        status: u32, flags: u32, fd: i32, pad1: u32,
    }

    /// `NVOS64_PARAMETERS`: the longer form of [`Alloc`].
    Alloc64 {
        root: u32, parent: u32, object: u32, class: u32, params: u64, rights: u64,
        params_bytes: u32, flags: u32, status: u32, pad0: u32,
    }

    /// `NVOS55_PARAMETERS`: makes an object of another client's.
    DupObject {
        root: u32, parent: u32, object: u32, source_root: u32, source: u32, flags: u32, status: u32,
    }

    /// `RS_SHARE_POLICY`: rights of other clients. `kind` and `action` are `RS_SHARE_TYPE_*` and
    /// `RS_SHARE_ACTION_FLAG_*`.
    SharePolicy { target: u32, rights: u32, kind: u16, action: u8, pad0: u8 }

    /// `NVOS57_PARAMETERS`: lets other clients use an object.
    Share { root: u32, object: u32, policy: SharePolicy, status: u32 }

    /// `NVOS34_PARAMETERS`.
    UnmapMemory {
        client: u32, device: u32, memory: u32, pad0: u32, linear: u64, status: u32, flags: u32,
    }

    /// `NVOS56_PARAMETERS`.
    UpdateMapping {
        client: u32, device: u32, memory: u32, pad0: u32, old: u64, new: u64, status: u32,
        pad1: u32,
    }

    /// `nv_ioctl_rm_api_version_t`.
    RmApiVersion { command: u32, reply: u32, version: [u8; 64] }

    /// `nv_ioctl_numa_info_t`.
    NumaInfo {
        node: i32, status: i32, block_bytes: u64, address: u64, bytes: u64, auto_online: u8,
        pad0: [u8; 7], offline: [u64; 64], offline_count: u32, pad1: u32,
    }

    /// `nv_ioctl_wait_open_complete_t`.
    WaitOpen { error: i32, adapter_status: u32 }
}

/// Number of cards in the argument of `NV_ESC_CARD_INFO`.
pub const MAX_CARDS: usize = 64;

call!(CardInfos, escapes::CARD_INFO as u8, "CARD_INFO", without status, volatile: [(0, size_of::<Self>())]);
call!(RegisterFd, escapes::REGISTER_FD as u8, "REGISTER_FD", without status, volatile: [(0, 4)]);
call!(AllocOsEvent, escapes::ALLOC_OS_EVENT as u8, "ALLOC_OS_EVENT", volatile: [(8, 12)]);
call!(GetEventData, 0x52, "RM_GET_EVENT_DATA", pointer: 0, volatile: [(0, 8)]);
call!(Free, escapes::FREE as u8, "RM_FREE");
call!(Alloc, escapes::ALLOC as u8, "RM_ALLOC", pointer: 16);
call!(Control, escapes::CONTROL as u8, "RM_CONTROL", pointer: 16);
call!(AllocMemory, escapes::ALLOC_MEMORY as u8, "RM_ALLOC_MEMORY", volatile: [(24, 32)]);
call!(MapMemory, escapes::MAP_MEMORY as u8, "RM_MAP_MEMORY", volatile: [(32, 40), (48, 52)]);
