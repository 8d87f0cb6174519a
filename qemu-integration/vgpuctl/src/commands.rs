//! Implementations of the commands. Each command returns its output.
//!
//! * [`read`]: `types`, `list`
//! * [`generate`]: `completions`, `man`
//! * [`stats`], [`scheduler`], [`focus`], [`import`], [`libvirt`], [`view`], [`web`]: the commands
//!   of these names
//! * [`parents`]: the host's physical devices
//! * [`mod@write`]: `define`, `undefine`, `modify`, `start`, `stop`
//! * [`mod@run`]: programs on a vGPU; [`run_vm`]: a VM with a vGPU; [`transient`]: vGPUs for the
//!   lifetime of either
//! * [`saving`]: `save`, `restore`, `resume`; [`mod@checkpoint`]: CUDA programs of VMs;
//!   [`vm_state`]: `vm save`, `vm restore`;
//!   [`mod@upgrade`]: other workers
//! * [`vm`]: `screenshot`, `qemu-args`, `libvirt-xml`
//! * [`new_file`]: what `save`, `vm save` and `screenshot` write

mod checkpoint;
mod focus;
mod generate;
mod import;
mod libvirt;
mod new_file;
mod parents;
mod read;
mod run;
mod run_vm;
mod saving;
mod scheduler;
pub mod stats;
mod transient;
mod upgrade;
mod view;
mod vm;
mod vm_state;
mod web;
mod write;

use std::time::Duration;

use vgpud_client::Client;

use crate::cli::{Cli, Command};
use crate::failure::{Failure, say};
use crate::{doctor, top};

/// Runs a command and returns its output.
pub async fn run(cli: Cli) -> Result<Vec<u8>, Failure> {
    let client = Client::new(cli.socket).on_silence(note_silence);
    match cli.command {
        Command::Types(args) => read::types(&client, args).await,
        Command::List(args) => read::list(&client, args).await,
        Command::Parents(args) => parents::parents(&args),
        Command::Stats(args) => stats::stats(&client, args).await,
        Command::Scheduler(args) => scheduler::scheduler(&client, args).await,
        Command::Doctor(args) => doctor::doctor(&client, args).await,
        Command::Completions(args) => Ok(generate::completions(&args)),
        Command::Man(args) => generate::man(&args),
        Command::Top(args) => top::top(&client, args).await,
        Command::Define(args) => write::define(&client, args).await,
        Command::Undefine(args) => write::undefine(&client, args).await,
        Command::Modify(args) => write::modify(&client, args).await,
        Command::Start(args) => write::start(&client, args).await,
        Command::Stop(args) => write::stop(&client, args).await,
        Command::Import(args) => import::import(&client, args).await,
        Command::StartParentMdevs { .. } => write::start_parent_mdevs(),
        Command::View(args) => view::view(&client, args).await,
        Command::Web(args) => web::web(&client, args).await,
        Command::Screenshot(args) => vm::screenshot(&client, args).await,
        Command::Focus(args) => focus::focus(&client, args).await,
        Command::QemuArgs(args) => vm::qemu_args(&client, args).await,
        Command::LibvirtXml(args) => vm::libvirt_xml(&client, args).await,
        Command::Run(args) => run::run(&client, args).await,
        Command::RunVm(args) => run_vm::run_vm(&client, args).await,
        Command::Vm(args) => vm_state::vm(&client, args).await,
        Command::Checkpoint(args) => checkpoint::checkpoint(&client, args).await,
        Command::Save(args) => saving::save(&client, args).await,
        Command::Restore(args) => saving::restore(&client, args).await,
        Command::Resume(args) => saving::resume(&client, args).await,
        Command::Upgrade(args) => upgrade::upgrade(&client, &args).await,
        Command::Libvirt(args) => libvirt::libvirt(&client, args).await,
    }
}

/// Says why a command waits.
fn note_silence(after: Duration) {
    let seconds = after.as_secs();
    say(format_args!(
        "note: vgpud has not answered for {seconds} s; `vgpuctl doctor` shows the last error of its log"
    ));
}
