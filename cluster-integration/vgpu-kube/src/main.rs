//! `vgpu-kube`: the node agent of Kubernetes.

use std::process::ExitCode;

use clap::CommandFactory;
use vgpu_kube::cli::{Cli, Command};
use vgpu_kube::{agent, doctor, hook, manifests};
use vgpud_host::command_line;

fn main() -> ExitCode {
    let cli = match command_line::parse::<Cli>(std::env::args_os()) {
        Ok(cli) => cli,
        Err(message) => return command_line::refuse("vgpu-kube", &message),
    };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vgpu-kube: {error:#}");
            ExitCode::FAILURE
        }
    }
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
