use proptest::prelude::*;

use super::*;

/// Section of a test file: name, type, flags, info, link, contents.
type Section<'a> = (&'a str, u32, u64, u32, u32, Vec<u8>);

const PROGBITS: u32 = 1;
const STRTAB: u32 = 3;
const NOBITS: u32 = 8;

/// Builds an ELF file as the compiler lays one out, with these sections and a kernel's symbol.
fn file(kernel: &str, sections: &[Section<'_>]) -> Vec<u8> {
    let names = format!("\0{kernel}\0");
    let mut symbols = vec![0; 24];
    symbols.extend([1u32.to_le_bytes(), [0x12, 0x10, 3, 0]].concat());
    symbols.extend([0; 16]);
    let mut all: Vec<Section<'_>> = vec![
        ("", 0, 0, 0, 0, Vec::new()),
        (".strtab", STRTAB, 0, 0, 0, names.into_bytes()),
        (".symtab", SHT_SYMTAB, 0, 1, 1, symbols),
    ];
    all.extend_from_slice(sections);
    let mut text = vec![0];
    let mut bytes = vec![0; 64];
    let mut headers = Vec::new();
    all.push((".shstrtab", STRTAB, 0, 0, 0, Vec::new()));
    for (index, (name, kind, flags, info, link, contents)) in all.iter().enumerate() {
        let name_at = text.len() as u32;
        text.extend([name.as_bytes(), &[0]].concat());
        let contents = if index + 1 == all.len() { &text } else { contents };
        let entry = if *kind == SHT_SYMTAB { 24u64 } else { 0 };
        let (at, len) = (bytes.len() as u64, contents.len() as u64);
        headers.extend([name_at.to_le_bytes(), kind.to_le_bytes()].concat());
        headers.extend([flags.to_le_bytes(), [0; 8], at.to_le_bytes(), len.to_le_bytes()].concat());
        headers.extend([link.to_le_bytes(), info.to_le_bytes()].concat());
        headers.extend([1u64.to_le_bytes(), entry.to_le_bytes()].concat());
        if *kind != NOBITS {
            bytes.extend(contents);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
    }
    let at = bytes.len() as u64;
    bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    bytes[16..20].copy_from_slice(&[2, 0, 190, 0]);
    bytes[20] = 1;
    bytes[40..48].copy_from_slice(&at.to_le_bytes());
    bytes[52..54].copy_from_slice(&64u16.to_le_bytes());
    bytes[58..60].copy_from_slice(&64u16.to_le_bytes());
    bytes[60..62].copy_from_slice(&(all.len() as u16).to_le_bytes());
    bytes[62..64].copy_from_slice(&(all.len() as u16 - 1).to_le_bytes());
    bytes.extend(headers);
    bytes
}

fn record(attribute: u8, words: &[u32]) -> Vec<u8> {
    let mut bytes = vec![FORMAT_SIZED, attribute, words.len() as u8 * 4, 0];
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    bytes
}

/// Returns a kernel with 24 registers, two barriers, 2 KiB of shared memory, and 28 bytes of
/// parameters at 0x210.
fn kernel() -> Vec<Section<'static>> {
    let about = [record(attribute::REGISTERS, &[1, 24]), record(attribute::STACK, &[1, 0])];
    let own = [
        vec![3, 0x1b, 0xff, 0],
        record(attribute::PARAMETERS, &[1, 28 << 16 | 0x210]),
        vec![FORMAT_BYTE, attribute::BARRIERS, 2, 0],
    ];
    vec![
        (".nv.info", 0x7000_0000, 0, 0, 0, about.concat()),
        (".nv.info.vadd", 0x7000_0000, 0, 0, 0, own.concat()),
        (".nv.constant0.vadd", PROGBITS, 2, 0, 0, vec![0; 0x22c]),
        (".text.vadd", PROGBITS, 6, 0, 0, vec![0x18; 384]),
        (".nv.shared.vadd", NOBITS, 3, 0, 0, vec![0; 2048]),
    ]
}

#[test]
fn resource_requirements_are_parsed() {
    let program = Program::find(&file("vadd", &kernel()), "vadd").unwrap();
    assert_eq!(
        program,
        Program {
            code: vec![0x18; 384],
            registers: 24,
            barriers: 2,
            shared_bytes: 2048,
            param_base: 0x210,
            param_bytes: 28,
            bank_bytes: 0x22c,
        }
    );
}

/// Output of nvcc 13.0 for `kernels/kernels.cu` and sm_90.
const REAL: &[u8] = include_bytes!("../../testdata/kernels.cubin");

#[test]
fn nvcc_output_of_own_kernels_is_parsed() {
    use mdev_core::abi::program::Kernel;
    for number in 1..=5 {
        let kernel = Kernel::from_number(number).unwrap();
        let name = crate::programs::name(kernel);
        let program = Program::find(REAL, name).unwrap();
        assert_eq!(program.param_base, 0x210, "{name}");
        let padding = kernel.param_bytes() - program.param_bytes;
        assert!(padding < 8 && program.code.len().is_multiple_of(128), "{name}: {program:?}");
        let (shared, barriers) = if name == "sgemm" { (0xc00, 1) } else { (0, 0) };
        assert_eq!((program.shared_bytes, program.barriers), (shared, barriers), "{name}");
        assert!((8..=64).contains(&program.registers), "{name}: {program:?}");
    }
}

#[test]
fn cubin_at_any_alignment_is_parsed() {
    let mut bytes = vec![0; REAL.len() + 8];
    for at in 0..8 {
        let place = &mut bytes[at..][..REAL.len()];
        place.copy_from_slice(REAL);
        assert!(!Program::find(place, "saxpy").unwrap().code.is_empty(), "{at} bytes on");
    }
}

#[test]
fn register_count_in_section_header_is_parsed() {
    let mut sections = kernel();
    sections[0].5.clear();
    sections[1].5.truncate(16);
    (sections[3].2, sections[3].3) = (1 << 20 | 6, 18 << 24 | 1);
    let program = Program::find(&file("vadd", &sections), "vadd").unwrap();
    assert_eq!((program.registers, program.barriers), (18, 1));
}

#[test]
fn unsupported_kernels_are_rejected_with_reason() {
    let refused = |sections: &[Section<'_>], why: &str| {
        let error = Program::find(&file("vadd", sections), "vadd").unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    let with = |change: fn(&mut Vec<Section<'static>>)| {
        let mut sections = kernel();
        change(&mut sections);
        sections
    };
    refused(&with(|all| drop(all.remove(3))), "no such kernel");
    refused(&with(|all| all[3].5.clear()), "no code");
    refused(&with(|all| all[0].5 = record(attribute::STACK, &[1, 64])), "registers");
    refused(&with(|all| all[0].5 = record(attribute::REGISTERS, &[1, 300])), "300 registers");
    refused(
        &with(|all| all[0].5 = [record(0x2f, &[1, 24]), record(0x12, &[1, 64])].concat()),
        "64 bytes of local memory",
    );
    refused(&with(|all| all[1].5.clear()), "parameters");
    refused(&with(|all| all[2].5.truncate(0x210)), "exceed the limits of a block");
    refused(&with(|all| all.push((".rela.text.vadd", 4, 0, 0, 0, vec![0; 24]))), "relocations");
    refused(&with(|all| all.push((".nv.constant2.vadd", 1, 0, 0, 0, vec![0; 8]))), "constants");
    let other = file("vadd", &kernel());
    assert!(Program::find(&other, "sgemm").unwrap_err().to_string().contains("sgemm"));
    let mut host = other;
    host[18] = 62;
    assert!(Program::find(&host, "vadd").unwrap_err().to_string().contains("not for an NVIDIA"));
}

proptest! {
    /// A damaged file is rejected or parsed, without a panic.
    #[test]
    fn damage_is_survived(at in any::<prop::sample::Index>(), value in any::<u8>(), cut in any::<prop::sample::Index>()) {
        let mut bytes = file("vadd", &kernel());
        let at = at.index(bytes.len());
        bytes[at] = value;
        let _ = Program::find(&bytes, "vadd");
        let _ = Program::find(&bytes[..cut.index(bytes.len())], "vadd");
    }
}
