//! Shapes of ioctl arguments, for the transport.

use cuda_socket::CallShape;
use cuda_socket::calls::NodeKind;
use nvidia_rm::table::Form;
use nvidia_rm::version::Layout;
use nvidia_rm::{escapes, uvm};

/// Returns the shapes of all arguments with pointers or descriptors, and of nvidia-uvm's.
pub fn shapes(layout: &Layout) -> Vec<CallShape> {
    let with_places = |form: &&Form| form.block.is_some() || form.fd.is_some();
    let rm = escapes::ROWS.iter().filter_map(|row| {
        let form = row.forms.first().filter(with_places)?;
        Some(shape(NodeKind::Rm, row.number, form))
    });
    let uvm = uvm::ROWS.iter().filter_map(|row| {
        let form = row.form(layout.series)?;
        let argument_bytes = Some(form.bytes as u32);
        Some(CallShape { argument_bytes, ..shape(NodeKind::Uvm, row.number, form) })
    });
    rm.chain(uvm).collect()
}

fn shape(node: NodeKind, number: u32, form: &Form) -> CallShape {
    CallShape {
        node,
        number,
        argument_bytes: None,
        block: form.block.map(|(pointer, len)| (pointer as u32, len as u32)),
        fd: form.fd.map(|at| at as u32),
    }
}
