//! Conformance suite for implementations of [`Client`]. A backend's tests call [`run`].
//!
//! The suite skips checks of capabilities that a backend lacks ([`GpuCapabilities`]). A failed
//! check panics.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed check panics")]

mod channels;
mod copies;
mod cuda;
mod driver;
mod faults;
mod kernels;
pub mod lifecycle;
mod refusals;
mod semaphores;
mod spaces;

use std::time::Duration;

use mdev_core::gpu::{Client, ClientSpec, GpuCapabilities};
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;

pub use driver::{Completion, Driver, Pushbuffer, Ring, readable};
pub use kernels::launch_program;

/// Function that opens a new client with at least 16 MiB of video memory, 4 channels and 64 MiB of
/// imports.
pub type Open<'a> = dyn FnMut() -> Box<dyn Client> + 'a;

/// Returns the specification of a new vGPU that is large enough for the suite.
pub fn client_spec() -> ClientSpec {
    ClientSpec {
        vgpu: VgpuId::random(),
        vram_bytes: 64 * MIB,
        framebuffer_bytes: 16 * MIB,
        max_channels: 8,
        max_import_bytes: 64 * MIB,
    }
}

/// Check: its name, the capabilities that it needs, and its function.
type Check = (&'static str, GpuCapabilities, fn(&mut Driver));

/// Capabilities for the software GPU's programs.
const PROGRAMS: GpuCapabilities = GpuCapabilities::COMPUTE.union(GpuCapabilities::SOFT_PROGRAMS);

/// Capabilities for a fixed-function unit.
const FIXED_FUNCTION: GpuCapabilities =
    GpuCapabilities::COMPUTE.union(GpuCapabilities::FIXED_FUNCTION);

/// Capabilities for copies to video memory that the guest's CPU reads.
const VRAM_COPY: GpuCapabilities = GpuCapabilities::COPY.union(GpuCapabilities::VRAM_APERTURE);

const CHECKS: &[Check] = &[
    ("copies unaligned ranges", GpuCapabilities::COPY, copies::copies),
    ("copies rectangles", GpuCapabilities::COPY, copies::rectangles),
    ("fills with a pattern", GpuCapabilities::COPY, copies::fills),
    ("copies to and from video memory", VRAM_COPY, copies::video_memory),
    ("releases semaphores in order, with timestamps", GpuCapabilities::COPY, semaphores::releases),
    ("waits for semaphores", GpuCapabilities::COPY, semaphores::acquires),
    ("wraps around its ring", GpuCapabilities::COPY, channels::ring_wraps),
    (
        "faults only the channel with an invalid address",
        GpuCapabilities::COPY,
        faults::address_faults,
    ),
    ("faults writes to read-only memory", GpuCapabilities::COPY, faults::read_only),
    ("faults a channel for invalid methods", GpuCapabilities::COPY, faults::invalid_methods),
    ("refuses physical addresses", GpuCapabilities::COPY, faults::physical),
    ("does not touch memory after its release", GpuCapabilities::COPY, channels::release_in_flight),
    ("destroys channels with work in flight", GpuCapabilities::COPY, channels::destroy_in_flight),
    ("works after a reset", GpuCapabilities::COPY, channels::reset),
    ("raises interrupts", GpuCapabilities::COPY, channels::interrupts),
    ("separates address spaces", GpuCapabilities::COPY, spaces::separation),
    ("destroys address spaces with their channels", GpuCapabilities::COPY, spaces::destruction),
    ("groups channels", GpuCapabilities::COPY, spaces::groups),
    ("refuses invalid requests", GpuCapabilities::COPY, refusals::refusals),
    ("executes programs", PROGRAMS, kernels::programs),
    ("executes no more threads than the grid has", PROGRAMS, kernels::grid_bounds),
    ("faults a channel for a bad descriptor", PROGRAMS, kernels::bad_descriptors),
    ("faults kernels that access their windows", PROGRAMS, kernels::windows),
    ("computes factorials", FIXED_FUNCTION, kernels::factorials),
    ("accepts libcuda's set-up methods", PROGRAMS, cuda::set_up),
    ("reduces in semaphores", PROGRAMS, cuda::reductions),
    ("releases semaphores of the compute class", PROGRAMS, cuda::reports),
    ("copies data of the pushbuffer", PROGRAMS, cuda::inline_copies),
    ("rearranges components", PROGRAMS, cuda::components),
    ("releases semaphores of launch descriptors", PROGRAMS, cuda::grid_releases),
    ("faults a channel for machine code", PROGRAMS, cuda::machine_code),
    ("preempts endless kernels", PROGRAMS.union(GpuCapabilities::PREEMPTION), kernels::preemption),
];

/// Runs all checks, each on a new client. Panics at the first failure, after printing the check's
/// name.
pub fn run(open: &mut Open<'_>) {
    run_with(open, driver::DEFAULT_TIMEOUT);
}

/// Runs all checks like [`run`], with a timeout for each wait.
pub fn run_with(open: &mut Open<'_>, timeout: Duration) {
    for (name, needs, check) in CHECKS {
        let client = open();
        if client.gpu().capabilities.contains(*needs) {
            eprintln!("conformance: {name}");
            let mut driver = Driver::new(client);
            driver.set_timeout(timeout);
            check(&mut driver);
        }
    }
}

/// Runs the check that needs no engine: the refusal of invalid requests.
pub fn run_refusals(open: &mut Open<'_>) {
    refusals::refusals(&mut Driver::new(open()));
}

/// Runs all checks like [`run`], but continues after a failure. Returns each check's name and
/// result.
pub fn survey(open: &mut Open<'_>) -> Vec<(&'static str, Result<(), String>)> {
    let mut results = Vec::new();
    for (name, needs, check) in CHECKS {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let client = open();
            if client.gpu().capabilities.contains(*needs) {
                check(&mut Driver::new(client));
            }
        }));
        let result = result.map_err(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
                .unwrap_or_default()
        });
        results.push((*name, result));
    }
    results
}
