//! Command line of `vgpu-guest`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use host_inventory::finding;
use mdev_core::abi::control::Features;
use mdev_core::gpu::EngineKind;
use mdev_core::units::{KIB, MIB};
use serde::Serialize;
use serde_json::json;

use crate::bench::{self, Load};
use crate::channel::Channel;
use crate::checkpoint::{
    self,
    agent::{Agent, Node},
};
use crate::device::Device;
use crate::doctor;
use crate::memory::{Buffer, Home};
use crate::pci::{Access, PciPlatform};
use crate::platform::Platform;
use crate::programs::DEFAULT_CUBIN;
use crate::properties::Properties;
use crate::pushbuffer::Methods;
use crate::screen::{self, Screen, show_console};
use crate::work::copy::{Copy, Rectangle};
use crate::work::factorial::Factorial;
use crate::work::fill::Fill;
use crate::work::mandelbrot::Mandelbrot;
use crate::work::saxpy::Saxpy;
use crate::work::sgemm::Sgemm;
use crate::work::spin::Spin;
use crate::work::vadd::VectorAdd;
use crate::work::{self, Report, Work};
use crate::{GuestError, access};

/// Drives the vGPU of this machine and checks the computed results. Exits with 1 on any error.
#[derive(Debug, Parser)]
#[command(name = "vgpu-guest", version)]
pub struct Cli {
    /// Prints one JSON object instead of text.
    #[arg(long, global = true)]
    json: bool,
    /// PCI address of the vGPU (such as 0000:00:10.0) [default: the first vGPU].
    #[arg(long, global = true, value_name = "ADDRESS")]
    pci: Option<String>,
    /// Machine code of the kernels (cubin), for GPUs that execute machine code.
    #[arg(long, global = true, value_name = "FILE", default_value = DEFAULT_CUBIN)]
    cubin: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Prints the vGPU's properties and features, also while another process uses the vGPU.
    Info,
    /// Checks this VM for the use of its vGPU, and prints a fix for each problem.
    ///
    /// Reads files only. Exits with 1 if there is a problem. As root it also reads the vGPU's
    /// registers where no driver has them.
    Doctor {
        /// Root directory of the checked system.
        #[arg(long, value_name = "DIR", default_value = "/")]
        root: PathBuf,
    },
    /// Waits for requests of the host to checkpoint this VM's CUDA programs, so that the VM can be
    /// saved with its vGPU, and carries them out. Needs root, and libcuda 570 or newer.
    Agent {
        /// Program that checkpoints a process, with the options of NVIDIA's cuda-checkpoint.
        #[arg(long, value_name = "PATH", default_value = checkpoint::DEFAULT_TOOL)]
        tool: PathBuf,
    },
    /// Measures reads and writes of the vGPU's registers, which the host emulates.
    Access {
        /// Number of accesses in each of five turns.
        #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
        count: u32,
    },
    #[command(flatten)]
    Job(Job),
}

/// Work on the vGPU's channels.
#[derive(Debug, Subcommand)]
enum Job {
    /// Copies guest RAM to video memory (or RAM, if there is no video memory) and back, fills, and
    /// copies a rectangle.
    Copy {
        /// Amount to copy, in MiB, or in KiB with the suffix K.
        #[arg(long, default_value = "16", value_parser = copy_size)]
        size: u64,
        /// Skips the rectangle, which takes one copy per row and is slow on some devices.
        #[arg(long)]
        linear: bool,
    },
    /// Computes x = x!, modulo 2^32.
    Factorial(Elements),
    /// Computes y = a * x + y.
    Saxpy(Elements),
    /// Computes c = a + b.
    Vadd(Elements),
    /// Multiplies two square matrices.
    Sgemm {
        /// Rows and columns of each matrix.
        #[arg(long, default_value_t = 256)]
        n: u32,
    },
    /// Draws the Mandelbrot set on the screen, or in memory if there is no display.
    Mandelbrot(Picture),
    /// Keeps the engine busy with kernels that only count.
    Spin {
        /// Time to launch kernels for.
        #[arg(long, default_value_t = 1.0, value_parser = seconds)]
        seconds: f64,
        /// Iterations of each kernel's threads [default: about 1 ms].
        #[arg(long)]
        iterations: Option<u32>,
    },
    /// Keeps the channel busy with a steady mixed load and checks every unit.
    Bench {
        /// Length of the run.
        #[arg(long, default_value_t = 5.0, value_parser = seconds)]
        seconds: f64,
        /// Time at the start and at the end that does not count as steady work.
        #[arg(long, default_value_t = 0.0, value_parser = seconds)]
        margin: f64,
        /// Approximate engine time of one unit, in microseconds.
        #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(10..=100_000))]
        kernel_us: u64,
        /// Units in flight.
        #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=250))]
        depth: u32,
    },
}

#[derive(Debug, Args)]
struct Elements {
    /// Number of elements.
    #[arg(long, default_value_t = 1 << 20, value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    n: u32,
}

#[derive(Debug, Args)]
struct Picture {
    /// Width in pixels [default: the screen's, or 1920 without a display].
    #[arg(long)]
    width: Option<u32>,
    /// Height in pixels [default: the screen's, or 1200 without a display].
    #[arg(long)]
    height: Option<u32>,
    /// Bytes from one row to the next [default: the screen's].
    #[arg(long)]
    pitch: Option<u32>,
    /// Time to zoom before drawing the whole set; 0 draws it once.
    #[arg(long, default_value_t = 0.0, value_parser = seconds)]
    seconds: f64,
    /// Returns the screen to the text console at the end, instead of leaving the picture visible.
    #[arg(long)]
    console: bool,
    /// Framebuffer device that reports the screen's mode [default: the vGPU's].
    #[arg(long, value_name = "PATH")]
    fb: Option<PathBuf>,
}

impl Cli {
    /// Runs the selected command.
    pub fn run(&self) -> anyhow::Result<()> {
        let open = |access| PciPlatform::open(self.pci.as_deref(), access);
        match &self.command {
            Command::Info => self.info(&open(Access::Shared)?),
            Command::Doctor { root } => self.doctor(root.clone()),
            Command::Agent { tool } => {
                let steps = checkpoint::Tool(tool.clone());
                Agent::new(&mut Node::open()?, &steps).run()
            }
            Command::Access { count } => {
                self.print(&access::measure(&open(Access::Exclusive)?, *count))
            }
            Command::Job(job) => {
                let platform = Box::new(open(Access::Exclusive)?);
                self.run_job(&Device::open_with(platform, &self.cubin)?, job)
            }
        }
    }

    fn run_job(&self, device: &Device, job: &Job) -> anyhow::Result<()> {
        match job {
            Job::Copy { size, linear } => {
                let mut channel = Channel::new(device, EngineKind::Copy)?;
                let words = (size / 4) as u32;
                self.job(&mut channel, &Copy::new(device, *size)?)?;
                self.job(&mut channel, &Fill::new(device, Home::Guest, words - 1)?)?;
                if !linear {
                    self.job(&mut channel, &Rectangle::new(device)?)?;
                }
                Ok(())
            }
            Job::Factorial(Elements { n }) => {
                self.compute(device, &Factorial::new(device, Home::Guest, *n)?)
            }
            Job::Saxpy(Elements { n }) => {
                self.compute(device, &Saxpy::new(device, Home::Guest, *n)?)
            }
            Job::Vadd(Elements { n }) => {
                self.compute(device, &VectorAdd::new(device, Home::Guest, *n)?)
            }
            Job::Sgemm { n } => self.compute(device, &Sgemm::new(device, Home::Guest, *n)?),
            Job::Mandelbrot(picture) => self.mandelbrot(device, picture),
            Job::Spin { seconds, iterations } => self.spin(device, *seconds, *iterations),
            Job::Bench { seconds, margin, kernel_us, depth } => {
                let load = Load {
                    duration: Duration::from_secs_f64(*seconds),
                    margin: Duration::from_secs_f64(*margin),
                    kernel: Duration::from_micros(*kernel_us),
                    depth: *depth,
                };
                self.print(&bench::run(device, &load)?)
            }
        }
    }

    fn compute(&self, device: &Device, job: &dyn Work) -> anyhow::Result<()> {
        self.job(&mut Channel::new(device, EngineKind::Compute)?, job)
    }

    fn job(&self, channel: &mut Channel, job: &dyn Work) -> anyhow::Result<()> {
        self.print(&work::run(job, channel)?)
    }

    fn print<T: Serialize + std::fmt::Display>(&self, result: &T) -> anyhow::Result<()> {
        if self.json {
            println!("{}", serde_json::to_string(result)?);
        } else {
            println!("{result}");
        }
        Ok(())
    }

    fn doctor(&self, root: PathBuf) -> anyhow::Result<()> {
        let (findings, problems) = doctor::run(root);
        if self.json {
            println!("{}", serde_json::to_string(&findings)?);
        } else {
            print!("{}", finding::text(&findings));
        }
        match problems {
            0 => Ok(()),
            1 => anyhow::bail!("1 problem found"),
            _ => anyhow::bail!("{problems} problems found"),
        }
    }

    fn info(&self, platform: &dyn Platform) -> anyhow::Result<()> {
        let vgpu = Properties::of(platform);
        vgpu.check()?;
        let (major, minor) = vgpu.version();
        let features: Vec<String> = vgpu
            .features()
            .iter_names()
            .map(|(name, _)| name.to_lowercase().replace('_', "-"))
            .collect();
        let location = platform.location();
        if self.json {
            let value = json!({
                "location": location, "gpu": vgpu.gpu_name(), "type": vgpu.type_name(),
                "uuid": vgpu.uuid(), "version": format!("{major}.{minor}"),
                "vram_bytes": vgpu.vram_bytes(), "features": features,
                "max_channels": vgpu.max_channels(),
            });
            println!("{value}");
            return Ok(());
        }
        println!("{location}: {} on {}", vgpu.type_name(), vgpu.gpu_name());
        println!("  uuid      {}", vgpu.uuid());
        println!("  interface {major}.{minor}, {}", features.join(", "));
        println!("  memory    {} MiB", vgpu.vram_bytes() / MIB);
        println!("  channels  {}", vgpu.max_channels());
        Ok(())
    }

    fn mandelbrot(&self, device: &Device, picture: &Picture) -> anyhow::Result<()> {
        let screen = match (picture.width, picture.height) {
            (Some(width), Some(height)) => {
                let pitch = picture.pitch.unwrap_or(width.saturating_mul(4));
                Screen { width, height, pitch, bits_per_pixel: 32, offset: 0 }
            }
            _ => current_mode(device, picture.fb.as_deref())?,
        };
        if screen.bits_per_pixel != 32 {
            let bits = screen.bits_per_pixel;
            anyhow::bail!("The screen has {bits} bits a pixel; set a mode with 32");
        }
        let size = (picture.width.unwrap_or(screen.width), picture.height.unwrap_or(screen.height));
        let pitch = picture.pitch.unwrap_or(screen.pitch);
        let bytes = u64::from(pitch) * u64::from(size.1);
        let surface = if device.features().contains(Features::DISPLAY) {
            Buffer::scanout(device, screen.offset, bytes)?
        } else {
            Buffer::guest(device, bytes)?
        };
        let mut channel = Channel::new(device, EngineKind::Compute)?;
        let mut job = Mandelbrot::new(device, surface, size, pitch)?;
        show_console(false);
        let result = draw(&mut channel, &mut job, Duration::from_secs_f64(picture.seconds));
        if picture.console || result.is_err() {
            show_console(true);
        }
        let (frames, report) = result?;
        if self.json {
            let mut value = serde_json::to_value(&report)?;
            value["frames"] = json!(frames);
            value["width"] = json!(size.0);
            value["height"] = json!(size.1);
            println!("{value}");
        } else {
            println!("{report} ({}x{}, {frames} frames)", size.0, size.1);
        }
        Ok(())
    }

    fn spin(&self, device: &Device, seconds: f64, iterations: Option<u32>) -> anyhow::Result<()> {
        let mut channel = Channel::new(device, EngineKind::Compute)?;
        let mut spin = Spin::new(device, 1)?;
        match iterations {
            Some(iterations) => spin.set_iterations(iterations),
            None => spin.calibrate(&mut channel, Duration::from_millis(1))?,
        }
        spin.prepare();
        let mut methods = Methods::new();
        spin.push(&mut methods);
        let before = channel.query()?.engine_ns;
        let (start, mut launches) = (Instant::now(), 0);
        loop {
            // A full ring blocks further submissions.
            channel.submit(&methods)?;
            launches += 1;
            if start.elapsed().as_secs_f64() >= seconds {
                break;
            }
        }
        channel.wait_idle()?;
        let elapsed = start.elapsed().as_secs_f64();
        let engine = channel.query()?.engine_ns.saturating_sub(before) as f64 / 1e9;
        let counted = spin.launches()?;
        if counted != launches {
            let what = format!("spin: {counted} launches counted, {launches} submitted");
            return Err(GuestError::Wrong(what).into());
        }
        if self.json {
            let value = json!({
                "job": "spin", "seconds": elapsed, "engine_seconds": engine,
                "launches": launches, "iterations": spin.iterations(), "checked": launches,
            });
            println!("{value}");
        } else {
            println!(
                "spin: {launches} launches of {} iterations in {elapsed:.2} s, engine {engine:.2} s, all counted",
                spin.iterations()
            );
        }
        Ok(())
    }
}

/// Turns on the screen of a framebuffer device and returns its mode, by default of the vGPU's. A
/// vGPU without a display has the mode of a usual screen.
fn current_mode(device: &Device, framebuffer: Option<&Path>) -> Result<Screen, GuestError> {
    if let Some(path) = framebuffer {
        return Screen::turn_on(path);
    }
    if !device.features().contains(Features::DISPLAY) {
        return Ok(Screen {
            width: 1920,
            height: 1200,
            pitch: 1920 * 4,
            bits_per_pixel: 32,
            offset: 0,
        });
    }
    let address = device.platform().location();
    let name = screen::framebuffer(Path::new(screen::GRAPHICS), &address)
        .ok_or(GuestError::NoFramebuffer(address))?;
    Screen::turn_on(&Path::new("/dev").join(name))
}

/// Zooms for `seconds`, then draws the whole set and checks the picture.
fn draw(
    channel: &mut Channel,
    job: &mut Mandelbrot,
    zoom: Duration,
) -> Result<(u32, Report), GuestError> {
    let mut methods = Methods::new();
    job.push(&mut methods);
    let (start, mut frames, mut height) = (Instant::now(), 0, 2.6);
    while start.elapsed() < zoom {
        job.look_at(-0.743_643_9, 0.131_825_91, height);
        channel.run(&methods)?;
        frames += 1;
        // Single precision is exhausted at deeper zoom levels.
        height = if height < 2e-4 { 2.6 } else { height * 0.95 };
    }
    job.look_at(-0.65, 0.0, 2.6);
    let report = work::run(job, channel)?;
    Ok((frames + 1, report))
}

/// Parses a size such as `16` (MiB) or `64K` into bytes.
fn copy_size(text: &str) -> Result<u64, String> {
    let (digits, unit) = text.strip_suffix('K').map_or((text, MIB), |digits| (digits, KIB));
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    let bytes = bytes.filter(|bytes| (KIB..=1024 * MIB).contains(bytes));
    bytes.ok_or_else(|| "1 to 1024 (MiB), or a number of KiB such as 64K".into())
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if (0.0..=86_400.0).contains(&value) => Ok(value),
        _ => Err("a number of seconds, 0 to 86400".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_mib_or_say_kib() {
        assert_eq!(copy_size("16"), Ok(16 * MIB));
        assert_eq!(copy_size("64K"), Ok(64 * KIB));
        for wrong in ["", "0", "K", "0K", "1025", "1048577K", "-1", "1M", "99999999999999999999"] {
            assert!(copy_size(wrong).is_err(), "{wrong}");
        }
    }
}
