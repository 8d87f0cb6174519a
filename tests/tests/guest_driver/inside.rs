//! What programs in a VM do. The tests start this program there with one of these.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::driver_files::{PIN_BYTES, Program, open};
use super::withheld_page::{Faults, PAGE};

/// Environment variable that is set in programs in a VM.
pub const MARK: &str = "TESSERA_TEST_IN_VM";

/// Files by which a test controls its program: what has happened, and what is to happen.
pub const READY: &str = "/tmp/ready";
pub const GO: &str = "/tmp/go";

/// Directory of the driver's files, with the version in one of them.
const PROC: &str = "/proc/driver/nvidia";

/// Pause of a thread while there is no vGPU.
const PAUSE: Duration = Duration::from_millis(5);

fn is_inside() -> bool {
    std::env::var_os(MARK).is_some()
}

/// Tells the test that it is its turn, and waits for it.
fn wait_for_test() -> Result<()> {
    fs::write(READY, "")?;
    while !Path::new(GO).exists() {
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// An ioctl for which the module has pinned pages waits for its argument, while the vGPU goes.
#[test]
#[ignore = "runs in a VM only"]
fn withholds_an_argument() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let program = Program::start()?;
    let faults = Faults::new()?;
    let (argument, pages) = (faults.withhold()?, faults.withhold()?);
    let (argument_at, pages_at) = (argument.address, pages.address);
    let server = thread::spawn(move || -> Result<()> {
        let give = |page| faults.give(page, &[0; PAGE]);
        // The program writes its argument. The module reads it and pins the pages, by what the
        // device has asked for. Then the module reads the argument again.
        ensure!(faults.wait()? == argument_at, "Not the argument is accessed first");
        give(argument_at)?;
        ensure!(faults.wait()? == pages_at, "The pages are not pinned");
        Faults::take(argument_at)?;
        give(pages_at)?;
        ensure!(faults.wait()? == argument_at, "The argument is read once");
        wait_for_test()?;
        give(argument_at).map_err(Into::into)
    });
    // SAFETY: the mapping is as long as a page, and nothing else refers to it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(argument_at as *mut u8, PIN_BYTES) };
    let result = program.pin_with(bytes, pages_at, PAGE);
    ensure!(server.join().is_ok_and(|result| result.is_ok()), "The pages were not served");
    let error = result.err().context("The ioctl succeeded without a vGPU")?;
    println!("the ioctl failed: {error}");
    drop((argument, pages));
    ensure!(error.raw_os_error() == Some(libc::EIO), "{error}");
    Ok(())
}

/// Number of requests that [`withholds_many_arguments`] sends.
pub const REQUESTS: usize = 32;

/// Many requests at a time wait for their arguments.
#[test]
#[ignore = "runs in a VM only"]
fn withholds_many_arguments() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let (program, faults) = (Program::start()?, Faults::new()?);
    let pages = (0..REQUESTS).map(|_| faults.withhold()).collect::<io::Result<Vec<_>>>()?;
    thread::scope(|scope| {
        for page in &pages {
            let (program, address) = (&program, page.address);
            scope.spawn(move || {
                // SAFETY: the mapping is as long as a page, and nothing else refers to it.
                let bytes =
                    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, PIN_BYTES) };
                program.request_with(bytes)
            });
        }
        let waiting = (0..REQUESTS).map(|_| faults.wait()).collect::<io::Result<Vec<_>>>()?;
        wait_for_test()?;
        waiting.iter().try_for_each(|page| faults.give(*page, &[0; PAGE]).map_err(Into::into))
    })
}

/// A program reads a file of the driver into memory that is not there.
#[test]
#[ignore = "runs in a VM only"]
fn withholds_the_memory_of_a_read() -> Result<()> {
    use std::io::Read;
    if !is_inside() {
        return Ok(());
    }
    let faults = Faults::new()?;
    let page = faults.withhold()?;
    let address = page.address;
    let server = thread::spawn(move || -> Result<()> {
        ensure!(faults.wait()? == address, "Another page is accessed");
        wait_for_test()?;
        faults.give(address, &[0; PAGE]).map_err(Into::into)
    });
    let mut file = fs::File::open(Path::new(PROC).join("version"))?;
    // SAFETY: the mapping is as long as a page, and nothing else refers to it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, PAGE) };
    let length = file.read(bytes)?;
    ensure!(server.join().is_ok_and(|result| result.is_ok()), "The page was not served");
    ensure!(length > 0 && bytes.starts_with(b"NVRM version"), "The file is empty");
    drop(page);
    Ok(())
}

/// Opens each kind of file and closes it.
fn open_and_close(_: &Program) -> io::Result<()> {
    for name in ["nvidiactl", "nvidia0", "nvidia-uvm"] {
        drop(open(name)?);
    }
    Ok(())
}

/// Reads the driver's files in /proc.
fn read_proc(_: &Program) -> io::Result<()> {
    fs::read(Path::new(PROC).join("version"))?;
    for gpu in fs::read_dir(Path::new(PROC).join("gpus"))? {
        fs::read(gpu?.path().join("information"))?;
    }
    Ok(())
}

/// Makes a process with copies of all mappings.
fn fork(_: &Program) -> io::Result<()> {
    // SAFETY: the new process calls nothing but `_exit`.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: ends the new process at once.
        0 => unsafe { libc::_exit(0) },
        // SAFETY: waits for the process.
        pid => match unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        },
    }
}

/// What the threads of [`races`] do, over and over.
type Operation = fn(&Program) -> io::Result<()>;

/// The operations by name.
pub const OPERATIONS: [(&str, Operation); 8] = [
    ("open", open_and_close),
    ("pin", Program::pin),
    ("map", Program::map_memory),
    ("doorbell", Program::map_doorbell),
    ("managed", Program::manage_memory),
    ("poll", Program::poll),
    ("proc", read_proc),
    ("fork", fork),
];

/// The program that all threads use, until one of them gets an error.
#[derive(Default)]
struct Shared(Mutex<Option<Arc<Program>>>);

impl Shared {
    fn get(&self) -> Option<Arc<Program>> {
        let mut program = self.0.lock().ok()?;
        if program.is_none() {
            *program = Program::start().ok().map(Arc::new);
        }
        program.clone()
    }

    /// Closes the files when the last thread has ended its operation.
    fn forget(&self, program: &Arc<Program>) {
        if let Ok(mut current) = self.0.lock() {
            current.take_if(|current| Arc::ptr_eq(current, program));
        }
    }
}

/// Repeats an operation until the test ends. Returns how often it succeeded, and its errors.
fn repeat(shared: &Shared, operation: Operation) -> (u32, BTreeMap<String, u32>) {
    let (mut done, mut errors) = (0, BTreeMap::new());
    while !Path::new(GO).exists() {
        let Some(program) = shared.get() else {
            thread::sleep(PAUSE);
            continue;
        };
        match operation(&program) {
            Ok(()) => done += 1,
            Err(error) => {
                *errors.entry(error.to_string()).or_default() += 1;
                shared.forget(&program);
            }
        }
    }
    (done, errors)
}

/// Runs all operations at once, in threads that share their files.
#[test]
#[ignore = "runs in a VM only"]
fn races() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let shared = Shared::default();
    fs::write(READY, "")?;
    thread::scope(|scope| {
        let shared = &shared;
        let threads = OPERATIONS
            .map(|(name, operation)| (name, scope.spawn(move || repeat(shared, operation))));
        for (name, thread) in threads {
            let (done, errors) = thread.join().ok().context("A thread panicked")?;
            println!("{name}={done} {errors:?}");
        }
        Ok(())
    })
}
