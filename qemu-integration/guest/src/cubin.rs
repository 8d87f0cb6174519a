//! Parser for cubins: ELF files with machine code, as NVIDIA's compiler produces them.
//!
//! A kernel consists of a code section, a bank of constants that holds its parameters, and a list
//! of attributes. Kernels with unsupported requirements (relocations, other constant banks, local
//! memory) are rejected.

use object::LittleEndian as Le;
use object::elf::{EM_CUDA, FileHeader64, SHT_REL, SHT_RELA, SHT_SYMTAB};
use object::read::elf::{FileHeader, SectionHeader, SectionTable, Sym};

use crate::GuestError;

/// Attributes of `.nv.info` sections (`EIATTR_*`).
mod attribute {
    /// `PARAM_CBANK`: symbol, then offset and size of the parameters in bank 0, 16 bits each.
    pub const PARAMETERS: u8 = 0x0a;
    /// `MIN_STACK_SIZE`: symbol, then bytes of local memory of a thread.
    pub const STACK: u8 = 0x12;
    /// `REGCOUNT`: symbol, then registers of a thread.
    pub const REGISTERS: u8 = 0x2f;
    /// `NUM_BARRIERS`: one byte.
    pub const BARRIERS: u8 = 0x4c;
}

/// Formats of attributes: the value is in the record or follows the record.
const FORMAT_BYTE: u8 = 2;
const FORMAT_SIZED: u8 = 4;

/// One kernel: code and resource requirements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Machine code.
    pub code: Vec<u8>,
    /// Registers of each thread.
    pub registers: u32,
    /// Barriers of each block.
    pub barriers: u32,
    /// Bytes of shared memory of each block, including the compiler's reserve for the system.
    pub shared_bytes: u32,
    /// Offset of the parameters in constant buffer 0.
    pub param_base: u32,
    /// Bytes of parameters.
    pub param_bytes: u32,
    /// Bytes of constant buffer 0.
    pub bank_bytes: u32,
}

impl Program {
    /// Finds the kernel `name` in a cubin.
    pub fn find(cubin: &[u8], name: &str) -> Result<Self, GuestError> {
        Reader::new(cubin)
            .and_then(|reader| reader.program(name))
            .map_err(|why| GuestError::Invalid(format!("kernel {name} of the cubin: {why}")))
    }
}

struct Reader<'data> {
    data: &'data [u8],
    sections: SectionTable<'data, FileHeader64<Le>>,
}

impl<'data> Reader<'data> {
    fn new(data: &'data [u8]) -> Result<Self, String> {
        let header = FileHeader64::<Le>::parse(data).map_err(|error| error.to_string())?;
        if header.e_machine(Le) != EM_CUDA {
            return Err("the file is not for an NVIDIA GPU: pass a cubin made by nvcc".into());
        }
        let sections = header.sections(Le, data).map_err(|error| error.to_string())?;
        Ok(Self { data, sections })
    }

    fn named(&self) -> impl Iterator<Item = (&'data [u8], &object::elf::SectionHeader64<Le>)> {
        self.sections
            .iter()
            .filter_map(|section| Some((self.sections.section_name(Le, section).ok()?, section)))
    }

    fn section(&self, name: &str) -> Option<&object::elf::SectionHeader64<Le>> {
        self.named().find(|(found, _)| *found == name.as_bytes()).map(|(_, section)| section)
    }

    fn bytes(&self, name: &str) -> Option<&'data [u8]> {
        self.section(name)?.data(Le, self.data).ok()
    }

    fn program(&self, name: &str) -> Result<Program, String> {
        let text = format!(".text.{name}");
        let section = self.section(&text).ok_or("no such kernel")?;
        let code = section.data(Le, self.data).map_err(|error| error.to_string())?.to_vec();
        if code.is_empty() {
            return Err("no code".into());
        }
        self.refuse_what_is_not_there(name)?;
        let symbol = self.symbol(name)?;
        let about = |(attribute, value): &(u8, &[u8]), wanted: u8| {
            (*attribute == wanted && word(value, 0) == Some(symbol)).then(|| word(value, 4))?
        };
        let info = self.attributes(".nv.info");
        let registers = info.iter().find_map(|record| about(record, attribute::REGISTERS));
        // Older compilers store the register count in the section's header.
        let registers = registers.unwrap_or(section.sh_info(Le) >> 24);
        if !(1..=255).contains(&registers) {
            return Err(format!("unsupported: {registers} registers"));
        }
        let stack = info.iter().find_map(|record| about(record, attribute::STACK)).unwrap_or(0);
        if stack > 0 {
            return Err(format!("unsupported: {stack} bytes of local memory for each thread"));
        }
        let own = self.attributes(&format!(".nv.info.{name}"));
        let parameters = own.iter().find(|(found, _)| *found == attribute::PARAMETERS);
        let place = parameters.and_then(|(_, value)| word(value, 4));
        let place = place.ok_or("no attribute for the parameters' offset")?;
        let (param_base, param_bytes) = (place & 0xffff, place >> 16);
        let barriers = own.iter().find(|(found, _)| *found == attribute::BARRIERS);
        let barriers = barriers.and_then(|(_, value)| value.first().copied());
        let barriers = barriers.map_or(section.sh_flags(Le) >> 20 & 0x7f, u64::from) as u32;
        let shared = self.section(&format!(".nv.shared.{name}"));
        let shared = shared.map_or(0, |section| section.sh_size(Le));
        let bank = self.section(&format!(".nv.constant0.{name}"));
        let bank = bank.map_or(0, |section| section.sh_size(Le));
        let end = u64::from(param_base + param_bytes);
        if bank < end || bank > 0x1_0000 || shared > 227 << 10 || barriers > 16 {
            return Err("requirements exceed the limits of a block".into());
        }
        Ok(Program {
            code,
            registers,
            // Shared memory is only useful with a barrier.
            barriers: barriers.max(u32::from(shared > 0)),
            shared_bytes: shared as u32,
            param_base,
            param_bytes,
            bank_bytes: bank as u32,
        })
    }

    /// Returns the index of the kernel's symbol, which attributes refer to.
    fn symbol(&self, name: &str) -> Result<u32, String> {
        let table =
            self.sections.symbols(Le, self.data, SHT_SYMTAB).map_err(|error| error.to_string())?;
        let found = table.enumerate().find(|(_, symbol)| {
            symbol.name(Le, table.strings()).is_ok_and(|found| found == name.as_bytes())
        });
        Ok(found.ok_or("no symbol")?.0.0 as u32)
    }

    fn refuse_what_is_not_there(&self, name: &str) -> Result<(), String> {
        for (found, section) in self.named() {
            let found = String::from_utf8_lossy(found);
            let kind = section.sh_type(Le);
            let of_it = found.ends_with(&format!(".{name}")) && section.sh_size(Le) > 0;
            if of_it && matches!(kind, SHT_REL | SHT_RELA) && found.contains(".text.") {
                return Err("unsupported: relocations of the code".into());
            }
            let bank = found.strip_prefix(".nv.constant").map(|rest| rest.split('.').next());
            if of_it && bank.is_some_and(|bank| bank != Some("0")) {
                return Err(format!("unsupported: constants in {found}"));
            }
        }
        Ok(())
    }

    /// Returns the records of an attribute section as code and value. Skips truncated records.
    fn attributes(&self, name: &str) -> Vec<(u8, &'data [u8])> {
        let mut rest = self.bytes(name).unwrap_or_default();
        let mut records = Vec::new();
        while let [format, attribute, low, high, after @ ..] = rest {
            let size = usize::from(u16::from_le_bytes([*low, *high]));
            rest = after;
            match *format {
                FORMAT_SIZED => {
                    let Some((value, after)) = rest.split_at_checked(size) else { break };
                    records.push((*attribute, value));
                    rest = after;
                }
                FORMAT_BYTE => records.push((*attribute, std::slice::from_ref(low))),
                _ => {}
            }
        }
        records
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

#[cfg(test)]
#[path = "cubin/tests.rs"]
mod tests;
