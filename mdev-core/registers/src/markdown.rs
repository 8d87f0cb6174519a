//! Register tables in Markdown, for `docs/`.

use std::fmt::{self, Write as _};

use crate::bank::Bank;
use crate::row::{Access, Width};

impl<R: Copy + PartialEq + fmt::Debug> Bank<R> {
    /// Returns the registers as a Markdown table.
    pub fn markdown(&self) -> String {
        let mut text = String::from(
            "| Offset | Name | Bits | Access | Reset | Writable | Saved | Meaning |\n\
             | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        );
        for row in self.rows() {
            let bits = match row.width {
                Width::Bytes(len) => format!("{len} bytes"),
                width => (8 * width.bytes()).to_string(),
            };
            let reset = match (row.width, row.access) {
                (Width::Bytes(_), _) | (_, Access::WriteOnly) => String::new(),
                _ if self.reset_value(row) != row.reset => "varies".to_owned(),
                _ => format!("{:#x}", row.reset),
            };
            let mask = match row.writable | row.w1c {
                0 => String::new(),
                mask => format!("{mask:#x}"),
            };
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "| {:#05x} | `{}` | {bits} | {} | {reset} | {mask} | {} | {} |",
                row.offset,
                row.name,
                row.access.abbreviation(),
                if row.saved { "yes" } else { "" },
                row.doc,
            );
        }
        text
    }
}
