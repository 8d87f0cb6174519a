//! The example's device.

use std::os::unix::net::UnixStream;

use vfio_user_server::device::pci;
use vfio_user_server::proto::message::Request;
use vfio_user_server::session::{Closed, Session};

#[path = "../../examples/scratch.rs"]
#[allow(dead_code, reason = "the example's main function")]
mod example;

use self::example::Scratch;
use super::support::{Connection, event};

/// Registers in BAR 0.
const VERSION: u64 = 0;
const SCRATCH: u64 = 4;
const DOORBELL: u64 = 8;

/// Registers of configuration space (PCI Local Bus 3.0, section 6.1).
const COMMAND: u64 = 0x04;
const CLASS: u64 = 0x08;
const BAR0: u64 = 0x10;
const CAPABILITIES: u64 = 0x34;

/// Capability id of PCI Express.
const CAP_EXPRESS: u32 = 0x10;
/// Offset of the device capabilities register in the PCI Express capability.
const EXPRESS_DEVCAP: u64 = 4;
/// Offset of the device control register in the PCI Express capability.
const EXPRESS_DEVCTL: u64 = 8;

/// Returns the offset of a capability in configuration space.
fn capability(connection: &mut Connection<Scratch>, id: u32) -> u64 {
    let mut at = connection.read(pci::CONFIG, CAPABILITIES) & 0xff;
    while at != 0 {
        let header = connection.read(pci::CONFIG, at.into());
        if header & 0xff == id {
            return at.into();
        }
        at = header >> 8 & 0xff;
    }
    panic!("no capability {id:#x}");
}

fn connect() -> Connection<Scratch> {
    Connection::new(Scratch::new().unwrap())
}

#[test]
fn configuration_space_has_the_identity() {
    let mut connection = connect();
    assert_eq!(connection.read(pci::CONFIG, 0), 0x0010_1b36, "device and vendor id");
    assert_eq!(connection.read(pci::CONFIG, CLASS), 0xff00_0000, "class and revision");
    connection.write(pci::CONFIG, 0, &[0; 4]);
    assert_eq!(connection.read(pci::CONFIG, 0), 0x0010_1b36, "the identity is read-only");
}

#[test]
fn bar_size_agrees_with_the_region() {
    let mut connection = connect();
    connection.write(pci::CONFIG, BAR0, &[0xff; 4]);
    let mask = connection.read(pci::CONFIG, BAR0);
    assert_eq!(mask, 0xffff_f000);
    let info = connection.request(&Request::GetRegionInfo { index: pci::BAR0, argsz: 32 }, &[]);
    let size = u64::from_ne_bytes(info[16..24].try_into().unwrap());
    assert_eq!(size, u64::from(!mask) + 1);
    connection.write(pci::CONFIG, BAR0, &0xfeb0_0000_u32.to_le_bytes());
    assert_eq!(connection.read(pci::CONFIG, BAR0), 0xfeb0_0000);
}

#[test]
fn registers_store_only_writable_bits() {
    let mut connection = connect();
    assert_eq!(connection.read(pci::BAR0, VERSION), 1);
    connection.write(pci::BAR0, VERSION, &[9; 4]);
    assert_eq!(connection.read(pci::BAR0, VERSION), 1, "VERSION is read-only");
    connection.write(pci::BAR0, SCRATCH, &[1, 2, 3, 4]);
    connection.write(pci::BAR0, SCRATCH + 1, &[0xaa]);
    assert_eq!(connection.read(pci::BAR0, SCRATCH), 0x0403_aa01);
    assert_eq!(connection.read(pci::BAR0, DOORBELL), 0, "DOORBELL is write-only");
    assert_eq!(connection.read(pci::BAR0, 12), 0, "there is no register");
}

#[test]
fn doorbell_signals_the_msi_eventfd() {
    let mut connection = connect();
    let event = event();
    connection.write(pci::BAR0, DOORBELL, &[0; 4]);
    connection.set_msi(Some(&event));
    assert!(event.read().is_err(), "MSI was not enabled");
    connection.write(pci::BAR0, DOORBELL, &[0; 4]);
    connection.write(pci::BAR0, DOORBELL, &[0; 4]);
    assert_eq!(event.read(), Ok(2));
    connection.set_msi(None);
    connection.write(pci::BAR0, DOORBELL, &[0; 4]);
    assert!(event.read().is_err(), "MSI is disabled");
}

/// Checks that `reset` resets registers and configuration space and keeps the eventfd.
fn check_reset(reset: impl Fn(&mut Connection<Scratch>)) {
    let mut connection = connect();
    let event = event();
    connection.set_msi(Some(&event));
    connection.write(pci::CONFIG, COMMAND, &[6, 0]);
    connection.write(pci::BAR0, SCRATCH, &[7; 4]);
    assert_eq!(connection.read(pci::CONFIG, COMMAND) & 6, 6);
    assert_eq!(connection.read(pci::BAR0, SCRATCH), 0x0707_0707);
    reset(&mut connection);
    assert_eq!(connection.read(pci::CONFIG, COMMAND) & 6, 0);
    assert_eq!(connection.read(pci::BAR0, SCRATCH), 0);
    connection.write(pci::BAR0, DOORBELL, &[0; 4]);
    assert_eq!(event.read(), Ok(1), "the client's eventfd survives");
}

#[test]
fn function_level_reset_resets_the_device() {
    check_reset(|connection| {
        let express = capability(connection, CAP_EXPRESS);
        let devcap = connection.read(pci::CONFIG, express + EXPRESS_DEVCAP);
        assert_eq!(devcap >> 28 & 1, 1, "function-level reset is offered");
        let devctl = connection.read(pci::CONFIG, express + EXPRESS_DEVCTL) as u16;
        let initiate = (devctl | 1 << 15).to_le_bytes();
        connection.write(pci::CONFIG, express + EXPRESS_DEVCTL, &initiate);
        let after = connection.read(pci::CONFIG, express + EXPRESS_DEVCTL) as u16;
        assert_eq!(after, devctl, "the reset bit reads as zero");
    });
}

#[test]
fn device_reset_resets_the_device() {
    check_reset(|connection| {
        connection.request(&Request::Reset, &[]);
    });
}

#[test]
fn disconnecting_drops_the_eventfd_and_keeps_the_device_usable() {
    let mut connection = connect();
    let first = event();
    connection.set_msi(Some(&first));
    let (client, server) = UnixStream::pair().unwrap();
    drop(std::mem::replace(&mut connection.client, client));
    let end = connection.session.on_ready(&mut connection.device);
    assert!(matches!(end, Err(Closed::ByPeer)), "{end:?}");

    connection.session = Session::new(server.into()).unwrap();
    connection.request(&Request::Version { major: 0, minor: 0, data: b"{}\0" }, &[]);
    connection.write(pci::BAR0, DOORBELL, &[0; 4]);
    assert!(first.read().is_err(), "the eventfd of the first client");
    let second = event();
    connection.set_msi(Some(&second));
    connection.write(pci::BAR0, DOORBELL, &[0; 4]);
    assert_eq!(second.read(), Ok(1));
}
