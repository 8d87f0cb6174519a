//! A vGPU from the guest's side, without a VM or in a VM of a few hundred bytes.

mod kvm;
mod runtime;
mod vfio_user_guest;
