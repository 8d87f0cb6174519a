//! Checkpoints by the libcuda of the tests, which is of series 550.
//!
//! libcuda exports functions for this from series 570 on. In series 550, NVIDIA's program
//! `cuda-checkpoint` gets a table of functions from libcuda, and calls one of them with its command
//! line, as a debugger shows. The tests do the same.

use std::ffi::{CString, c_char, c_int, c_void};

use anyhow::{Context, Result, ensure};
use libloading::{Library, Symbol};

/// UUID of the table.
static TABLE: [u8; 16] = [
    0x69, 0xa2, 0x8e, 0x9f, 0x24, 0x49, 0x8b, 0x47, 0xb0, 0x30, 0xc5, 0xda, 0x33, 0x0e, 0xa4, 0xe9,
];
/// Index of the function in the table.
const FUNCTION: usize = 7;

type GetExportTable = unsafe extern "C" fn(*mut *const usize, *const [u8; 16]) -> c_int;
type Function = unsafe extern "C" fn(c_int, *const *const c_char) -> c_int;

/// Checkpoints a process, or restores it if it is checkpointed. libcuda writes the reason of a
/// failure to the standard error.
pub fn toggle(pid: u32) -> Result<()> {
    // SAFETY: libcuda's initializers have no requirements.
    let library = unsafe { Library::new("libcuda.so.1") }.context("Cannot load libcuda")?;
    // SAFETY: the type is that of cuda.h.
    let get: Symbol<'_, GetExportTable> = unsafe { library.get(b"cuGetExportTable\0") }?;
    let mut table = std::ptr::null();
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { get(&raw mut table, &raw const TABLE) };
    ensure!(code == 0 && !table.is_null(), "This libcuda has no such table: {code}");
    // SAFETY: the first word is the length of the table in bytes, and the others are pointers.
    let found = unsafe {
        let len = *table / size_of::<usize>();
        (FUNCTION < len).then(|| *table.add(FUNCTION)).filter(|address| *address != 0)
    };
    let address = found.context("The table is shorter")? as *const c_void;
    // SAFETY: the function has this type, as a debugger shows.
    let function = unsafe { std::mem::transmute::<*const c_void, Function>(address) };
    let words = ["cuda-checkpoint", "--toggle", "--pid", &pid.to_string()].map(CString::new);
    let words = words.into_iter().collect::<Result<Vec<_>, _>>()?;
    let mut args: Vec<_> = words.iter().map(|word| word.as_ptr()).collect();
    args.push(std::ptr::null());
    let count = c_int::try_from(words.len())?;
    // SAFETY: the arguments are those of a main function, and live until its return.
    let code = unsafe { function(count, args.as_ptr()) };
    ensure!(code == 0, "The function returned {code}");
    Ok(())
}
