//! Requests of CUDA programs, from the rows of the driver's protocol.

use nvidia_rm::table::Row;
use nvidia_rm::{classes, controls, escapes, uvm};

use crate::input::Input;

/// Length of arguments that a vGPU does not read.
const UNREAD: usize = 16;

/// Number and length of the argument or the parameters.
pub type Request = (u32, usize);

fn requests<H>(rows: &[Row<H>]) -> Vec<Request> {
    let lengths = |row: &Row<H>| {
        let lengths: Vec<_> = row.forms.iter().map(|form| (row.number, form.bytes)).collect();
        if lengths.is_empty() { vec![(row.number, UNREAD)] } else { lengths }
    };
    rows.iter().flat_map(lengths).collect()
}

/// Requests by kind.
#[derive(Debug)]
pub struct Requests {
    /// Ioctls of the resource manager's files, with the length in the number.
    pub escapes: Vec<Request>,
    /// Ioctls of nvidia-uvm.
    pub uvm: Vec<Request>,
    /// Classes.
    pub classes: Vec<Request>,
    /// Controls.
    pub controls: Vec<Request>,
}

impl Default for Requests {
    fn default() -> Self {
        let encoded = |(number, len): Request| (0xc000_4600 | (len as u32) << 16 | number, len);
        Self {
            escapes: requests(escapes::ROWS).into_iter().map(encoded).collect(),
            uvm: requests(uvm::ROWS),
            classes: requests(classes::ROWS),
            controls: requests(controls::ROWS),
        }
    }
}

/// Takes one of some requests, or rarely one with any number.
pub fn pick(input: &mut Input<'_>, from: &[Request]) -> Request {
    match input.byte() {
        0xff => (input.u32(), usize::from(input.byte())),
        byte => from[(usize::from(byte) << 8 | usize::from(input.byte())) % from.len()],
    }
}
