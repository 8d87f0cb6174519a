//! Ioctls of `/dev/nvidiactl` and `/dev/nvidiaN` (`NV_ESC_*`), by the low byte of the request.

use crate::abi::{
    Alloc, Alloc64, AllocMemory, AllocOsEvent, CardInfo, Control, DupObject, Free, MapMemory,
    NumaInfo, RegisterFd, RmApiVersion, Share, UnmapMemory, UpdateMapping, WaitOpen,
};
use crate::table::Policy::{Answer, Operate, Succeed};

handlers! {
    /// Code that carries out an escape.
    Escape:
    Alloc, AllocMemory, CardInfo, CheckVersion, Control, DupObject, Free, MapMemory, NumaInfo,
    OsEvent, RegisterFd, Share, WaitOpen,
}

rows! { Escape:
    0x27 NV_ESC_RM_ALLOC_MEMORY as ALLOC_MEMORY [form!(AllocMemory, status = status, fd = fd)]
        => Operate(Escape::AllocMemory);
    0x29 NV_ESC_RM_FREE as FREE [form!(Free, status = status)] => Operate(Escape::Free);
    0x2a NV_ESC_RM_CONTROL as CONTROL [form!(Control, status = status; params, params_bytes)]
        => Operate(Escape::Control);
    0x2b NV_ESC_RM_ALLOC as ALLOC [form!(Alloc64, status = status), form!(Alloc, status = status)]
        => Operate(Escape::Alloc);
    0x34 NV_ESC_RM_DUP_OBJECT as DUP_OBJECT [form!(DupObject, status = status)]
        => Operate(Escape::DupObject);
    0x35 NV_ESC_RM_SHARE as SHARE [form!(Share, status = status)] => Operate(Escape::Share);
    0x4e NV_ESC_RM_MAP_MEMORY as MAP_MEMORY [form!(MapMemory, status = status, fd = fd)]
        => Operate(Escape::MapMemory);
    0x4f NV_ESC_RM_UNMAP_MEMORY [form!(UnmapMemory, status = status)]
        => Succeed("nothing is mapped by address");
    0x5e NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO [form!(UpdateMapping, status = status)]
        => Succeed("nothing is mapped by address");
    // As many cards as the argument has room for.
    0xc8 NV_ESC_CARD_INFO as CARD_INFO [form!(CardInfo)] => Answer(Escape::CardInfo);
    0xc9 NV_ESC_REGISTER_FD as REGISTER_FD [form!(RegisterFd, fd = control)]
        => Operate(Escape::RegisterFd);
    0xce NV_ESC_ALLOC_OS_EVENT as ALLOC_OS_EVENT [form!(AllocOsEvent, status = status, fd = fd)]
        => Operate(Escape::OsEvent);
    0xcf NV_ESC_FREE_OS_EVENT [form!(AllocOsEvent, status = status, fd = fd)]
        => Operate(Escape::OsEvent);
    0xd2 NV_ESC_CHECK_VERSION_STR [form!(RmApiVersion)] => Answer(Escape::CheckVersion);
    0xd4 NV_ESC_ATTACH_GPUS_TO_FD [] => Succeed("an emulated GPU is always attached");
    0xd6 NV_ESC_SYS_PARAMS [] => Succeed("they are the host's");
    0xd7 NV_ESC_NUMA_INFO [form!(NumaInfo)] => Answer(Escape::NumaInfo);
    0xda NV_ESC_WAIT_OPEN_COMPLETE [form!(WaitOpen)] => Answer(Escape::WaitOpen);
}
