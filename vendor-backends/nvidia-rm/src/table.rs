//! Rows of the protocol: what a request is, and what a vGPU does with it.

use std::fmt;

/// Name of a number that the published headers do not have.
pub const UNNAMED: &str = "UNNAMED";

/// The series of the driver that Tessera is tested with. Queries reach a driver with parameters of
/// its lengths only.
pub const TESTED_SERIES: u16 = 580;

/// Request of programs: an escape, an ioctl of nvidia-uvm, a class or a control. `H` has a variant
/// for each piece of code that carries out requests.
#[derive(Debug)]
pub struct Row<H: 'static> {
    /// Number.
    pub number: u32,
    /// Symbol of the driver's headers, or [`UNNAMED`].
    pub name: &'static str,
    /// Forms of the argument or the parameters, the newest first. Empty if a vGPU does not read
    /// them.
    pub forms: &'static [Form],
    /// What a vGPU does.
    pub policy: Policy<H>,
    /// Why the driver may be asked, in rows of queries that reach it.
    pub ask: Option<Safe>,
}

/// What a vGPU does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy<H> {
    /// The request succeeds and changes nothing, for this reason.
    Succeed(&'static str),
    /// The request fails with this status, for this reason.
    Refuse(u32, &'static str),
    /// The request is answered with what the vGPU is or has.
    Answer(H),
    /// The request becomes an operation of the vGPU.
    Operate(H),
    /// The request is answered by the GPU's driver if [`Row::ask`] says so, and else from a
    /// recording.
    Query,
}

/// Reason why a query may reach the driver of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Safe {
    /// The query changes nothing, and its parameters are numbers: neither pointers nor handles.
    Numbers,
    /// The same, but for a route to the graphics engine. One that names a channel is refused.
    Route,
}

/// Form of an argument, from a series of the driver on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Form {
    /// First series with this form.
    pub since: u16,
    /// Length in bytes.
    pub bytes: usize,
    /// Offset of the `NV_STATUS`.
    pub status: Option<usize>,
    /// Offset of a file descriptor.
    pub fd: Option<usize>,
    /// Offsets of a pointer and of the length of what it points to, in bytes.
    pub block: Option<(usize, usize)>,
    /// Offset of a `NV2080_CTRL_GR_ROUTE_INFO`.
    pub route: Option<usize>,
}

/// Returns a form of a length, without places that a transport or the driver has to know.
pub(crate) const fn bytes(bytes: usize) -> Form {
    Form { since: 0, bytes, status: None, fd: None, block: None, route: None }
}

impl Form {
    /// Makes this the form since a series.
    pub(crate) const fn since(self, since: u16) -> Self {
        Self { since, ..self }
    }

    /// Adds a route.
    pub(crate) const fn route(self, at: usize) -> Self {
        Self { route: Some(at), ..self }
    }
}

impl<H> Row<H> {
    /// Returns the form of the argument in a series.
    pub fn form(&self, series: u16) -> Option<&Form> {
        self.forms.iter().find(|form| form.since <= series)
    }

    /// Returns the longest form that fits into `len` bytes.
    pub fn form_within(&self, len: usize) -> Option<&Form> {
        self.forms.iter().find(|form| form.bytes <= len)
    }

    /// Returns the shortest form.
    pub fn shortest(&self) -> Option<&Form> {
        self.forms.iter().min_by_key(|form| form.bytes)
    }

    /// Returns the form with which the query may reach the driver.
    pub fn asked(&self) -> Option<&Form> {
        self.ask.and_then(|_| self.form(TESTED_SERIES))
    }

    /// Returns the piece of code that carries the request out.
    pub fn handler(&self) -> Option<&H> {
        match &self.policy {
            Policy::Answer(handler) | Policy::Operate(handler) => Some(handler),
            Policy::Succeed(_) | Policy::Refuse(..) | Policy::Query => None,
        }
    }
}

/// Number of a request, with its name if a table has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Label {
    /// Number.
    pub number: u32,
    /// Name, or [`UNNAMED`].
    pub name: &'static str,
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name {
            UNNAMED => write!(f, "{:#x}", self.number),
            name => write!(f, "{name} ({:#x})", self.number),
        }
    }
}

/// Returns the row of a number.
pub fn find<H>(rows: &'static [Row<H>], number: u32) -> Option<&'static Row<H>> {
    rows.iter().find(|row| row.number == number)
}

/// Returns a number with its name.
pub fn label<H>(rows: &'static [Row<H>], number: u32) -> Label {
    Label { number, name: find(rows, number).map_or(UNNAMED, |row| row.name) }
}

/// Defines `ROWS`, and a constant for each row that code names.
macro_rules! rows {
    ($handler:ident: $(
        $number:literal $name:ident $(as $short:ident)? [$($form:expr),* $(,)?] => $policy:expr $(, $ask:ident)?;
    )*) => {
        /// The table.
        pub static ROWS: &[crate::table::Row<$handler>] = &[$(crate::table::Row {
            number: $number,
            name: stringify!($name),
            forms: &[$($form),*],
            policy: $policy,
            ask: rows!(@ask $($ask)?),
        }),*];

        $($(
            #[doc = concat!("`", stringify!($name), "`.")]
            pub const $short: u32 = $number;
        )?)*
    };
    (@ask) => { None };
    (@ask $ask:ident) => { Some(crate::table::Safe::$ask) };
}

/// Defines the enumeration of a table's handlers. They are named after the requests.
macro_rules! handlers {
    ($(#[$doc:meta])* $name:ident: $($handler:ident),* $(,)?) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "handlers are named after their requests")]
        pub enum $name { $($handler),* }
    };
}

/// Returns the [`Form`] of a structure, with places by the names of its fields.
macro_rules! form {
    ($kind:ident $(, $place:ident = $field:ident)* $(; $pointer:ident, $len:ident)?) => {
        crate::table::Form {
            $($place: Some(std::mem::offset_of!($kind, $field)),)*
            $(block: Some((
                std::mem::offset_of!($kind, $pointer),
                std::mem::offset_of!($kind, $len),
            )),)?
            ..crate::table::bytes(size_of::<$kind>())
        }
    };
}
