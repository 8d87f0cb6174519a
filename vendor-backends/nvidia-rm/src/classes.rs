//! Classes of objects (`NV_ESC_RM_ALLOC`).

use crate::abi::{
    ChannelParams, ContextShareParams, CopyParams, DebuggerParams, EventParams, GroupParams,
    MemoryParams, VaSpaceParams,
};
use crate::numbers::status;
use crate::table::Policy::{Answer, Operate, Refuse, Succeed};
use crate::table::{Form, bytes};

handlers! {
    /// Code that creates an object.
    Class:
    Channel, Client, Compute, ContextShare, Copy, Debugger, Doorbell, Event, Group, SystemMemory,
    Space, StatusPage, VideoMemory, VirtualMemory,
}

const CHANNEL: Form = form!(ChannelParams).since(610);
const CHANNEL_570: Form = bytes(368).since(570);
const CHANNEL_550: Form = bytes(360);
const QUERIES: &str = "the object only answers queries";

rows! { Class:
    0x0000 NV01_ROOT as ROOT [] => Operate(Class::Client);
    0x0001 NV01_ROOT_NON_PRIV as ROOT_CLIENT [] => Operate(Class::Client);
    0x0041 NV01_ROOT_CLIENT as CLIENT [] => Operate(Class::Client);
    0x003e NV01_MEMORY_SYSTEM as SYSTEM_MEMORY [form!(MemoryParams)]
        => Operate(Class::SystemMemory);
    0x0040 NV01_MEMORY_LOCAL_USER as VIDEO_MEMORY [form!(MemoryParams)]
        => Operate(Class::VideoMemory);
    0x0073 NV04_DISPLAY_COMMON as DISPLAY []
        => Refuse(status::NOT_SUPPORTED, "the GPU has no display");
    0x0079 NV01_EVENT_OS_EVENT as OS_EVENT [form!(EventParams)] => Operate(Class::Event);
    0x0080 NV01_DEVICE_0 as DEVICE [] => Succeed("there is one device");
    0x00de RM_USER_SHARED_DATA as STATUS_PAGE [] => Answer(Class::StatusPage);
    0x2080 NV20_SUBDEVICE_0 as SUBDEVICE [] => Succeed(QUERIES);
    0x2081 NV2081_BINAPI [] => Succeed(QUERIES);
    0x208f NV20_SUBDEVICE_DIAG [] => Succeed(QUERIES);
    0x503c NV50_THIRD_PARTY_P2P as THIRD_PARTY_P2P [] => Succeed(QUERIES);
    0x50a0 NV50_MEMORY_VIRTUAL as VIRTUAL_MEMORY [form!(MemoryParams)]
        => Answer(Class::VirtualMemory);
    0x83de GT200_DEBUGGER as DEBUGGER [form!(DebuggerParams)] => Operate(Class::Debugger);
    0x9067 FERMI_CONTEXT_SHARE_A as CONTEXT_SHARE [form!(ContextShareParams)]
        => Operate(Class::ContextShare);
    0x90e6 GF100_SUBDEVICE_MASTER [] => Succeed(QUERIES);
    0x90f1 FERMI_VASPACE_A as VA_SPACE
        [form!(VaSpaceParams).since(580), bytes(48)] => Operate(Class::Space);
    0xa06c KEPLER_CHANNEL_GROUP_A as GROUP [form!(GroupParams)] => Operate(Class::Group);
    0xc640 AMPERE_SMC_MONITOR_SESSION [] => Succeed(QUERIES);
    0xcb33 NV_CONFIDENTIAL_COMPUTE [] => Succeed(QUERIES);

    // Of generations of GPUs. A GPU has those that its generation names, and doorbell pages of all.
    0xc46f TURING_CHANNEL_GPFIFO_A [CHANNEL, CHANNEL_570, CHANNEL_550]
        => Operate(Class::Channel);
    0xc56f AMPERE_CHANNEL_GPFIFO_A [CHANNEL, CHANNEL_570, CHANNEL_550]
        => Operate(Class::Channel);
    0xc86f HOPPER_CHANNEL_GPFIFO_A as HOPPER_CHANNEL
        [CHANNEL, CHANNEL_570, CHANNEL_550] => Operate(Class::Channel);
    0xc96f BLACKWELL_CHANNEL_GPFIFO_A [CHANNEL, CHANNEL_570, CHANNEL_550]
        => Operate(Class::Channel);
    0xca6f BLACKWELL_CHANNEL_GPFIFO_B [CHANNEL, CHANNEL_570, CHANNEL_550]
        => Operate(Class::Channel);
    0xc5c0 TURING_COMPUTE_A [] => Operate(Class::Compute);
    0xc6c0 AMPERE_COMPUTE_A [] => Operate(Class::Compute);
    0xc7c0 AMPERE_COMPUTE_B [] => Operate(Class::Compute);
    0xc9c0 ADA_COMPUTE_A [] => Operate(Class::Compute);
    0xcbc0 HOPPER_COMPUTE_A [] => Operate(Class::Compute);
    0xcdc0 BLACKWELL_COMPUTE_A [] => Operate(Class::Compute);
    0xcec0 BLACKWELL_COMPUTE_B [] => Operate(Class::Compute);
    0xc5b5 TURING_DMA_COPY_A [form!(CopyParams)] => Operate(Class::Copy);
    0xc6b5 AMPERE_DMA_COPY_A [form!(CopyParams)] => Operate(Class::Copy);
    0xc7b5 AMPERE_DMA_COPY_B [form!(CopyParams)] => Operate(Class::Copy);
    0xc8b5 HOPPER_DMA_COPY_A [form!(CopyParams)] => Operate(Class::Copy);
    0xc9b5 BLACKWELL_DMA_COPY_A [form!(CopyParams)] => Operate(Class::Copy);
    0xcab5 BLACKWELL_DMA_COPY_B [form!(CopyParams)] => Operate(Class::Copy);
    0xc461 TURING_USERMODE_A [] => Operate(Class::Doorbell);
    0xc561 AMPERE_USERMODE_A [] => Operate(Class::Doorbell);
    0xc661 HOPPER_USERMODE_A as USERMODE [] => Operate(Class::Doorbell);
    0xc761 BLACKWELL_USERMODE_A [] => Operate(Class::Doorbell);
}
