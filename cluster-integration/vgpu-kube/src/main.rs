//! `vgpu-kube`: the node agent of Kubernetes.

use std::io::Write;
use std::process::ExitCode;

use clap::CommandFactory;
use mdev_core::untrusted::{message, one_line};
use vgpu_kube::cli::{Cli, Command};
use vgpu_kube::{agent, doctor, hook, manifests};
use vgpud_host::command_line;

/// Longest message of the log, in characters.
const MAX_MESSAGE: usize = 4096;

fn main() -> ExitCode {
    let cli = match command_line::parse::<Cli>(std::env::args_os()) {
        Ok(cli) => cli,
        Err(message) => return command_line::refuse("vgpu-kube", &message),
    };
    start_log();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vgpu-kube: {}", message(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

/// Starts the log. A message is one line: names of claims, pods and domains come from users.
fn start_log() {
    let env = env_logger::Env::default().default_filter_or("info");
    let mut log = env_logger::Builder::from_env(env);
    log.format(|to, record| {
        let message = one_line(&record.args().to_string(), MAX_MESSAGE);
        let (time, level, target) = (to.timestamp(), record.level(), record.target());
        writeln!(to, "[{time} {level:<5} {target}] {message}")
    });
    log.init();
}

fn run(cli: Cli) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match cli.command {
            Command::Run(args) => agent::run(args).await,
            Command::Doctor(args) => doctor::run(args).await,
            Command::Hook(args) => hook::run(args).await,
            Command::Man => {
                let page = clap_mangen::Man::new(Cli::command()).section("8");
                page.render(&mut std::io::stdout())?;
                Ok(())
            }
            Command::Manifests(args) => {
                print!("{}", manifests::text(args.node.as_deref())?);
                Ok(())
            }
        }
    })
}
