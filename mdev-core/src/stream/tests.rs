//! Streams: what is written is read, and no damage goes unnoticed.

use proptest::prelude::*;

use super::*;
use crate::units::MIB;

fn head() -> Head {
    Head {
        tessera: "0.1.0".into(),
        vgpu: VgpuId(uuid::Uuid::from_u128(7)),
        mdev_type: "SOFT-256MQ".into(),
        vram_bytes: 4 * MIB,
        place: None,
    }
}

fn sample() -> Vec<u8> {
    let mut writer = StreamWriter::new(Vec::new(), &head()).unwrap();
    writer.state(&vec![b's'; MAX_CHUNK + 5]).unwrap();
    writer.memory(0x1000, &[1; 0x1000]).unwrap();
    writer.memory(2 * MIB, &vec![2; MAX_CHUNK]).unwrap();
    writer.finish().unwrap()
}

/// Reads a stream to its end. Returns the state and the video memory.
fn read(bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>), StreamError> {
    let (mut reader, found) = StreamReader::new(bytes)?;
    let (mut state, mut memory) = (Vec::new(), vec![0; found.vram_bytes.min(4 * MIB) as usize]);
    loop {
        match reader.next_part()? {
            Part::State(piece) => state.extend_from_slice(piece),
            Part::Machine(data) | Part::Domain(data) => state.extend_from_slice(data),
            Part::Guest { address, data } => {
                state.extend(address.0.to_le_bytes());
                state.extend_from_slice(data);
            }
            Part::Next(next) => state.extend(next.place.unwrap_or_default().to_le_bytes()),
            Part::Memory { offset, data } => {
                memory[offset as usize..][..data.len()].copy_from_slice(data);
            }
            Part::End => return Ok((state, memory)),
        }
    }
}

#[test]
fn what_was_written_is_read() {
    let (state, memory) = read(&sample()).unwrap();
    assert_eq!(state, vec![b's'; MAX_CHUNK + 5]);
    assert_eq!((memory[0xfff], memory[0x1000], memory[0x1fff], memory[0x2000]), (0, 1, 1, 0));
    assert!(memory[2 << 20..3 << 20].iter().all(|byte| *byte == 2));
    let (_, found) = StreamReader::new(&sample()[..]).unwrap();
    assert_eq!(found, head());
}

/// Reads a stream in pieces of a length. Returns the state and the video memory.
fn parse(bytes: &[u8], piece: usize) -> Result<(Vec<u8>, Vec<u8>), StreamError> {
    let mut parser = StreamParser::default();
    let (mut state, mut memory) = (Vec::new(), vec![0; 4 << 20]);
    for piece in bytes.chunks(piece) {
        parser.push(piece);
        while let Some(part) = parser.next_part()? {
            match part {
                Part::State(data) | Part::Machine(data) | Part::Domain(data) => {
                    state.extend_from_slice(data);
                }
                Part::Next(next) => state.extend(next.place.unwrap_or_default().to_le_bytes()),
                Part::Guest { address, data } => {
                    state.extend(address.0.to_le_bytes());
                    state.extend_from_slice(data);
                }
                Part::Memory { offset, data } => {
                    memory[offset as usize..][..data.len()].copy_from_slice(data);
                }
                Part::End => {}
            }
        }
    }
    if parser.has_ended() { Ok((state, memory)) } else { Err(StreamError::Cut) }
}

#[test]
fn a_stream_in_pieces_is_the_same() {
    let whole = sample();
    let expected = read(&whole).unwrap();
    for piece in [1000, 70_001, whole.len()] {
        assert!(parse(&whole, piece).unwrap() == expected, "{piece}");
    }
    assert!(matches!(parse(&whole[..whole.len() - 1], 999), Err(StreamError::Cut)));
    let more = [&whole[..], &whole[12..40]].concat();
    assert!(parse(&more, 999).is_err() && read(&more).is_err(), "more after the end");
}

#[test]
fn foreign_newer_and_cut_streams_are_told_apart() {
    assert!(matches!(read(b""), Err(StreamError::Foreign)));
    assert!(matches!(read(b"QEVM\0\0\0\x03 and more"), Err(StreamError::Foreign)));
    let mut newer = sample();
    newer[8] = 9;
    assert!(matches!(read(&newer), Err(StreamError::Version(9))));
    newer[8] = 0;
    assert!(matches!(read(&newer), Err(StreamError::Version(0))));
    let whole = sample();
    for len in [12, 40, 200, whole.len() - 20, whole.len() - 1] {
        assert!(matches!(read(&whole[..len]), Err(StreamError::Cut)), "{len}");
    }
}

#[test]
fn parts_in_another_order_are_refused() {
    let write = |parts: &[(u32, u64, usize)]| {
        let mut writer = StreamWriter::new(Vec::new(), &head()).unwrap();
        for (kind, offset, len) in parts {
            writer.chunk(*kind, *offset, &vec![0; *len]).unwrap();
        }
        writer.finish().unwrap()
    };
    let vgpu = [(kind::STATE, 0, 4), (kind::STATE, 4, 4), (kind::MEMORY, 0, 4)];
    read(&write(&vgpu)).unwrap();
    let guest = [(kind::STATE, 0, 4), (kind::GUEST, 4096, 4), (kind::GUEST, 1 << 40, 9)];
    read(&write(&[&guest[..], &vgpu[2..]].concat())).unwrap();
    let machine = [(kind::MACHINE, 0, 9), (kind::MACHINE, 9, 4)];
    read(&write(&[&vgpu[..], &machine].concat())).unwrap();
    for parts in [
        &[(kind::STATE, 4, 4)][..],
        &[(kind::MEMORY, 0, 4), (kind::STATE, 0, 4)],
        &[(kind::MEMORY, 4, 4), (kind::MEMORY, 7, 4)],
        &[(kind::MEMORY, 4 * MIB - 1, 2)],
        &[(kind::MEMORY, u64::MAX, 2)],
        &[(kind::MEMORY, 0, 0)],
        &[(kind::GUEST, 0, 4), (kind::STATE, 0, 4)],
        &[(kind::MEMORY, 0, 4), (kind::GUEST, 0, 4)],
        &[(kind::GUEST, 4, 4), (kind::GUEST, 7, 4)],
        &[(kind::GUEST, u64::MAX, 2)],
        &[(kind::GUEST, 0, 0)],
        &[(kind::MACHINE, 0, 4), (kind::MACHINE, 3, 4)],
        &[(kind::MACHINE, 0, 4), (kind::MEMORY, 0, 4)],
        &[(kind::MACHINE, 0, 4), (kind::DOMAIN, 0, 4)],
        &[(kind::DOMAIN, 0, 4), (kind::MEMORY, 0, 4)],
        &[(kind::DOMAIN, 0, 4), (kind::DOMAIN, 3, 4)],
        &[(kind::NEXT, 0, 4)],
        &[(kind::HEAD, 0, 4)],
        &[(kind::END, 3, 0)],
        &[(9, 0, 4)],
    ] {
        assert!(matches!(read(&write(parts)), Err(StreamError::Damaged(_))), "{parts:?}");
    }
}

#[test]
fn a_vm_has_several_vgpus_and_a_domain() {
    let second = Head { place: Some(0x180), vram_bytes: 8 * MIB, ..head() };
    let vm = |more: usize| {
        let mut writer = StreamWriter::new(Vec::new(), &head()).unwrap();
        writer.state(b"first").unwrap();
        writer.memory(3 * MIB, &[1; 9]).unwrap();
        for _ in 0..more {
            writer.next(&second).unwrap();
            writer.state(b"next").unwrap();
            writer.memory(0, &[2; 9]).unwrap();
        }
        writer.domain(b"<domain/>").unwrap();
        writer.machine(b"vm").unwrap();
        writer.finish().unwrap()
    };
    let whole = vm(1);
    let expected = b"first\x80\x01next<domain/>vm";
    let (state, memory) = read(&whole).unwrap();
    assert_eq!((&state[..], memory[0], memory[3 << 20]), (&expected[..], 2, 1));
    assert!(parse(&whole, 17).unwrap() == (state, memory));
    read(&vm(MAX_VGPUS - 1)).unwrap();
    assert!(matches!(read(&vm(MAX_VGPUS)), Err(StreamError::Damaged(_))), "too many");
}

proptest! {
    #[test]
    fn no_damage_goes_unnoticed(at in any::<prop::sample::Index>(), byte in 1_u8..) {
        let mut bytes = sample();
        let at = at.index(bytes.len());
        bytes[at] ^= byte;
        prop_assert!(read(&bytes).is_err());
        prop_assert!(parse(&bytes, 65_536).is_err());
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut stream = sample()[..12].to_vec();
        stream.extend(bytes);
        let _ = (read(&stream), parse(&stream, 7));
    }
}
