//! Records that a worker which a guest has compromised may have left.

use std::fs::File;
use std::os::unix::fs::FileExt;

use mdev_core::gpu::Client;
use mdev_core::units::MIB;
use nvidia_rm::fake_rm::{self, FakeRm};
use proptest::prelude::*;
use vendor_backends::nvidia::NvidiaGpu;
use vendor_backends::nvidia::adoption::descriptors;

use super::{Anchor, CONTINUED, with_work};
use crate::{DRIVER, spec};

/// Offsets and lengths of the slots: of the state, of the channels and of engine time.
const SLOTS: [(u64, u64); 6] = [
    (4096, STATE),
    (4096 + STATE, STATE),
    (4096 + 2 * STATE, LIVE),
    (4096 + 2 * STATE + LIVE, LIVE),
    (4096 + 2 * STATE + 2 * LIVE, LIVE),
    (4096 + 2 * STATE + 3 * LIVE, LIVE),
];
const STATE: u64 = 4 << 20;
const LIVE: u64 = 16 << 10;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// No record leads to a panic, or to more memory than was granted.
    #[test]
    fn damaged_records_are_refused(at in 0_u64..2048, bit in 0_u32..32, slot in 0_u64..6) {
        let rm = FakeRm::new(DRIVER);
        let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, CONTINUED).unwrap();
        let (mut anchor, mut worker) = Anchor::new(&rm, &mut gpu, &spec(64 * MIB));
        worker = with_work(&mut anchor, worker).0;
        worker.end();
        let journal = anchor.kept[&descriptors::JOURNAL].try_clone().unwrap();
        let begin = slot.checked_sub(1).map_or(0, |slot| SLOTS[slot as usize].0);
        let at = begin + at / 4 * 4;
        let file = File::from(journal);
        damage(&file, at, 1 << bit);
        // A checksum is no secret: the contents are checked, too.
        repair_checksums(&file);
        let objects = rm.objects();
        if let Ok(worker) = anchor.adopt() {
            prop_assert!(worker.client.spec().vram_bytes == 64 * MIB || at >= 4096);
            prop_assert!(rm.video_memory() <= 64 * MIB);
        } else {
            // A worker of the program before may continue.
            prop_assert_eq!(rm.objects(), objects);
        }
    }
}

fn damage(file: &File, at: u64, bits: u32) {
    let mut word = [0; 4];
    file.read_exact_at(&mut word, at).unwrap();
    let word = (u32::from_le_bytes(word) ^ bits).to_le_bytes();
    file.write_all_at(&word, at).unwrap();
}

/// Makes the checksums of all slots right.
fn repair_checksums(file: &File) {
    for (slot, bytes) in SLOTS {
        let mut len = [0; 4];
        file.read_exact_at(&mut len, slot + 8).unwrap();
        let len = u64::from(u32::from_le_bytes(len));
        if len <= bytes - 16 {
            let mut contents = vec![0; len as usize];
            file.read_exact_at(&mut contents, slot + 16).unwrap();
            let checksum = crc32fast::hash(&contents);
            file.write_all_at(&checksum.to_le_bytes(), slot + 12).unwrap();
        }
    }
}
