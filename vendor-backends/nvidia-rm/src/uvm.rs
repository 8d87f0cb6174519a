//! Ioctls of `/dev/nvidia-uvm` (`UVM_*`). Requests do not encode the length of their arguments.

use crate::abi::uvm::{
    AllocSemaphorePool, CreateRangeGroup, DisablePeerAccess, Free590, Gpu, GpuRange, Initialize,
    MapExternal, Migrate, MmInitialize, PageableMemAccess, PageableMemAccessOnGpu, Range,
    RegisterChannel, RegisterGpu, RegisterSpace, SetPreferredLocation, SetRangeGroup,
    UnregisterChannel, UnregisterChannel590,
};
use crate::table::Policy::{Answer, Operate, Succeed};
use crate::table::bytes;

handlers! {
    /// Code that carries out an ioctl of nvidia-uvm.
    Uvm:
    AllocSemaphorePool, CreateExternalRange, CreateRangeGroup, Free, ManagedRange,
    MapDynamicParallelism, MapExternal, Migrate, PageableMemAccess, PageableMemAccessOnGpu,
    RegisterGpu, RegisterSpace, UnmapExternal,
}

const FOLLOWS_RM: &str = "the resource manager's object has the state";
const NO_MIGRATION: &str = "memory does not move";

rows! { Uvm:
    0x3000_0001 UVM_INITIALIZE as INITIALIZE [form!(Initialize, status = status)]
        => Succeed("the file has no other state");
    0x3000_0002 UVM_DEINITIALIZE [bytes(0)] => Succeed("closing the file ends its ranges");
    23 UVM_CREATE_RANGE_GROUP [form!(CreateRangeGroup, status = status)]
        => Operate(Uvm::CreateRangeGroup);
    24 UVM_DESTROY_RANGE_GROUP [form!(CreateRangeGroup, status = status)] => Succeed(NO_MIGRATION);
    25 UVM_REGISTER_GPU_VASPACE as REGISTER_GPU_VASPACE
        [form!(RegisterSpace, status = status, fd = control)] => Operate(Uvm::RegisterSpace);
    26 UVM_UNREGISTER_GPU_VASPACE [form!(Gpu, status = status)] => Succeed(FOLLOWS_RM);
    27 UVM_REGISTER_CHANNEL [form!(RegisterChannel, status = status, fd = control)]
        => Succeed(FOLLOWS_RM);
    28 UVM_UNREGISTER_CHANNEL as UNREGISTER_CHANNEL [
        form!(UnregisterChannel590, status = status).since(590),
        form!(UnregisterChannel, status = status),
    ] => Succeed(FOLLOWS_RM);
    30 UVM_DISABLE_PEER_ACCESS [form!(DisablePeerAccess, status = status)]
        => Succeed("a vGPU has no peers");
    31 UVM_SET_RANGE_GROUP [form!(SetRangeGroup, status = status)] => Succeed(NO_MIGRATION);
    33 UVM_MAP_EXTERNAL_ALLOCATION as MAP_EXTERNAL
        [form!(MapExternal, status = status, fd = control)] => Operate(Uvm::MapExternal);
    34 UVM_FREE as FREE [form!(Free590, status = status).since(590), form!(Range, status = status)]
        => Operate(Uvm::Free);
    37 UVM_REGISTER_GPU [form!(RegisterGpu, status = status, fd = control)]
        => Answer(Uvm::RegisterGpu);
    38 UVM_UNREGISTER_GPU [form!(Gpu, status = status)] => Succeed(FOLLOWS_RM);
    39 UVM_PAGEABLE_MEM_ACCESS [form!(PageableMemAccess, status = status)]
        => Answer(Uvm::PageableMemAccess);
    42 UVM_SET_PREFERRED_LOCATION as SET_PREFERRED_LOCATION
        [form!(SetPreferredLocation, status = status)] => Operate(Uvm::ManagedRange);
    43 UVM_UNSET_PREFERRED_LOCATION [form!(Range, status = status)] => Operate(Uvm::ManagedRange);
    44 UVM_ENABLE_READ_DUPLICATION [form!(Range, status = status)] => Operate(Uvm::ManagedRange);
    45 UVM_DISABLE_READ_DUPLICATION [form!(Range, status = status)] => Operate(Uvm::ManagedRange);
    46 UVM_SET_ACCESSED_BY [form!(GpuRange, status = status)] => Operate(Uvm::ManagedRange);
    47 UVM_UNSET_ACCESSED_BY [form!(GpuRange, status = status)] => Operate(Uvm::ManagedRange);
    51 UVM_MIGRATE as MIGRATE [form!(Migrate, status = status)] => Operate(Uvm::Migrate);
    65 UVM_MAP_DYNAMIC_PARALLELISM_REGION as MAP_DYNAMIC_PARALLELISM
        [form!(GpuRange, status = status)] => Operate(Uvm::MapDynamicParallelism);
    66 UVM_UNMAP_EXTERNAL as UNMAP_EXTERNAL [form!(GpuRange, status = status)]
        => Operate(Uvm::UnmapExternal);
    68 UVM_ALLOC_SEMAPHORE_POOL as ALLOC_SEMAPHORE_POOL
        [form!(AllocSemaphorePool, status = status)] => Operate(Uvm::AllocSemaphorePool);
    70 UVM_PAGEABLE_MEM_ACCESS_ON_GPU [form!(PageableMemAccessOnGpu, status = status)]
        => Answer(Uvm::PageableMemAccessOnGpu);
    72 UVM_VALIDATE_VA_RANGE [form!(Range, status = status)]
        => Succeed("requests check their ranges");
    73 UVM_CREATE_EXTERNAL_RANGE [form!(Range, status = status)]
        => Operate(Uvm::CreateExternalRange);
    75 UVM_MM_INITIALIZE [form!(MmInitialize, status = status, fd = uvm)]
        => Succeed("the file has no other state");
}
