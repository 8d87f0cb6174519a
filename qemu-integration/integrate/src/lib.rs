//! Builders of QEMU arguments and libvirt XML.
