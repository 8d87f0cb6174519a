//! Structures of the driver's kernel interface (`nvos.h`, `nv-ioctl.h`, `alloc_channel.h`, `cl*.h`,
//! `ctrl*.h`).
//!
//! * [`ioctl`]: arguments of ioctls
//! * [`map_dma`]: mapping of memory at GPU virtual addresses
//! * [`alloc`]: parameters of object allocations
//! * [`control`]: parameters of controls
//! * [`uvm`]: arguments of nvidia-uvm's ioctls
//!
//! A test compares sizes and offsets with those of the published headers. Where a structure grew
//! with a series of the driver, the structure here has the longest form, and
//! [`Layout`](crate::version::Layout) has its size in each series.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Argument of an ioctl.
pub trait Call: FromBytes + IntoBytes + Immutable + KnownLayout {
    /// Number of the ioctl (`NV_ESC_*`).
    const NUMBER: u8;
    /// Name for messages and recordings.
    const NAME: &'static str;
    /// Offset of the pointer to the parameters, in calls with parameters.
    const POINTER: Option<usize> = None;
    /// Byte ranges that differ between runs (descriptors, addresses). Recordings blank them.
    const VOLATILE: &'static [(usize, usize)] = &[];

    /// Returns the `NV_STATUS` that the driver wrote, or 0 in calls without a status.
    fn status(&self) -> u32;
}

/// Defines structures, with names of fields after the driver's, and a list of them.
macro_rules! structures {
    ($(
        $(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ty),* $(,)? }
    )*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            #[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
            #[allow(missing_docs, reason = "fields are named after the driver's")]
            pub struct $name { $($(#[$field_doc])* pub $field: $kind,)* }

            impl Default for $name {
                fn default() -> Self {
                    zerocopy::FromZeros::new_zeroed()
                }
            }
        )*

        #[cfg(test)]
        pub(super) const STRUCTURES: &[super::layouts::Structure] = &[
            $((stringify!($name), size_of::<$name>(), &[
                $((stringify!($field), std::mem::offset_of!($name, $field))),*
            ])),*
        ];
    };
}

/// Implements [`Call`] for an argument with a field `status`, or without one.
macro_rules! call {
    (
        $name:ident, $number:expr, $call_name:expr
        $(, without $without:ident)? $(, pointer: $at:expr)? $(, volatile: $ranges:expr)?
    ) => {
        impl Call for $name {
            const NUMBER: u8 = $number;
            const NAME: &'static str = $call_name;
            $(const POINTER: Option<usize> = Some($at);)?
            $(const VOLATILE: &'static [(usize, usize)] = &$ranges;)?

            fn status(&self) -> u32 {
                call!(@status self $($without)?)
            }
        }
    };
    (@status $self:ident) => { $self.status };
    (@status $self:ident status) => { 0 };
}

#[cfg(test)]
mod layouts;

pub mod alloc;
pub mod control;
pub mod ioctl;
pub mod map_dma;
pub mod uvm;

pub use alloc::*;
pub use control::*;
pub use ioctl::*;
pub use map_dma::*;
