//! Handover of a vGPU from one process of its VM to another.

use std::os::unix::fs::FileExt;

use super::saved::busy;
use super::*;

/// Attaches as a new process does: other files of the same size, a reset, and BARs of zero.
fn attach_new_process(guest: &mut Guest) {
    let both = DmaAccess::READ | DmaAccess::WRITE;
    let (_, fd) = guest_ram(RAM);
    guest.function.dma_map(GuestPa(0), RAM, both, Some((fd, 0))).unwrap();
    guest.function.reset();
    for bar in 0..6 {
        guest.write32(CONFIG, 0x10 + 4 * bar, 0);
    }
}

#[test]
fn the_new_process_gets_the_vgpu_as_it_was() {
    let mut guest = busy();
    let channels = guest.record.lock().unwrap().channels.clone();
    let mapped = guest.record.lock().unwrap().mapped.clone();
    let registers = guest.function.save();
    let handover = guest.function.begin_handover().unwrap();
    assert!(guest.record.lock().unwrap().channels.is_empty(), "nothing works meanwhile");
    attach_new_process(&mut guest);
    assert_ne!(guest.function.save(), registers);
    let writes = guest.function.finish_handover(&handover).unwrap();
    assert_eq!(writes, guest.function.config_writes());
    assert_eq!(guest.function.save(), registers);
    assert!(guest.record.lock().unwrap().paused, "until it is resumed");
    drop(handover);
    guest.function.resume().unwrap();
    let record = guest.record.lock().unwrap();
    assert!(record.channels.keys().eq(channels.keys()));
    assert!(record.mapped.keys().eq(mapped.keys()));
}

#[test]
fn the_old_process_gets_the_vgpu_back() {
    let mut guest = busy();
    let mapped = guest.record.lock().unwrap().mapped.clone();
    let registers = guest.function.save();
    guest.ram.write_all_at(b"the guest's", 0x5000).unwrap();
    let handover = guest.function.begin_handover().unwrap();
    attach_new_process(&mut guest);
    guest.function.finish_handover(&handover).unwrap();
    // It has ended, after it got the vGPU.
    guest.function.release_client();
    guest.function.abandon_handover(handover).unwrap();
    guest.function.resume().unwrap();
    assert_eq!(guest.function.save(), registers);
    assert!(guest.record.lock().unwrap().mapped.keys().eq(mapped.keys()));
    let mut found = [0; 11];
    guest.function.memory.lock().read(GuestPa(0x5000), &mut found).unwrap();
    assert_eq!(&found, b"the guest's", "its own memory");
}
