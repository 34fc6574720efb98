package cli

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

func (a *app) useCommands() []*cobra.Command {
	return []*cobra.Command{a.runCommand(), a.attachCommand(), a.closeCommand()}
}

// runOptions are the flags of run.
type runOptions struct {
	box, image, workdir, requestID string
	env, volumes, mounts, models   []string
	tty, detach, noStdin, keep, rm bool
	cpus                           float64
	memory                         string
	pids                           int64
	deadline, grace                time.Duration
	spool, overflow                string
}

func (a *app) runCommand() *cobra.Command {
	var o runOptions
	c := &cobra.Command{
		Use: "run [flags] -- CMD [ARG…]", Short: "Run a command in a box",
		Long: `Runs a command in a box and behaves like it: both outputs apart, its standard input, its exit
status. Without --box the box is new and removed afterwards; with --box KEY it is kept under that
key, with its workspace, home and cache, and found again by the next run.

Ctrl-C asks the command to stop (SIGTERM, then SIGKILL after --grace); a second Ctrl-C kills it.
With -t it runs on a terminal and Ctrl-C goes to the command; Ctrl-P Ctrl-Q leaves it running.
The output survives a restart of the server: the command goes on and no byte is lost.

Exit status: the command's own; 128+N if signal N ended it; 137 out of memory; 124 at its deadline;
126 not executable; 127 not found; 125 when Stockade itself could not do it.`,
		Example: "  stockade run -- uname -a\n  tar -c . | stockade run --box build -- sh -c 'tar -x && make test'\n  stockade run --box dev -t -- bash\n  stockade run --detach --box dev -- ./long-job",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.box == "" && cmd.Flags().Changed("box") {
				return errdefs.New(errdefs.Invalid, "--box is empty").WithNext("give the box a key, or leave --box out for a new one")
			}
			code, err := a.run(cmd.Context(), o, args)
			if err != nil {
				return err
			}
			if code != 0 {
				return exitError{code}
			}
			return nil
		},
	}
	f := c.Flags()
	f.SetInterspersed(false)
	f.StringVar(&o.box, "box", "", "reuse key of the box")
	f.StringVar(&o.image, "image", "", "image of a new box (default: the host profile)")
	f.StringArrayVarP(&o.env, "env", "e", nil, "NAME=VALUE, or NAME to pass on this shell's value")
	f.StringVarP(&o.workdir, "workdir", "w", "", "directory below /workspace")
	f.StringArrayVarP(&o.volumes, "volume", "v", nil, "SRC:DST[:ro]: mount a directory the operator allows into a new box")
	f.StringArrayVar(&o.mounts, "mount", nil, "type=bind,source=SRC,target=DST[,readonly]: the same, in long form")
	f.StringSliceVar(&o.models, "model", nil, "model provider the command may reach; the box is then its own")
	f.BoolVarP(&o.tty, "tty", "t", false, "run on a terminal")
	f.BoolVarP(&o.detach, "detach", "d", false, "print the handle and leave it running")
	f.BoolP("interactive", "i", false, "forward input, which is done in any case; so that -it is understood")
	f.BoolVar(&o.noStdin, "no-stdin", false, "give the command no input")
	f.BoolVar(&o.rm, "rm", false, "remove the new box afterwards, which is done in any case")
	f.BoolVar(&o.keep, "keep", false, "keep the new box (it is removed when idle)")
	f.Float64Var(&o.cpus, "cpus", 0, "processors of a new box")
	f.StringVarP(&o.memory, "memory", "m", "", "memory of a new box, like 512m or 2g")
	f.Int64Var(&o.pids, "pids", 0, "processes and threads of a new box")
	f.DurationVar(&o.deadline, "deadline", 0, "stop it after so long")
	f.DurationVar(&o.grace, "grace", 5*time.Second, "time between SIGTERM and SIGKILL")
	f.StringVar(&o.spool, "spool", "", "log kept on disk, like 64m")
	f.StringVar(&o.overflow, "overflow", "", "at the log's cap: block, or drop_oldest (default when detached)")
	f.StringVar(&o.requestID, "request-id", "", "id of this request; the same id with the same arguments in one run is one process")
	return c
}

// run carries out "stockade run" and returns the exit status that stands for how
// the command ended.
func (a *app) run(ctx context.Context, o runOptions, argv []string) (int, error) {
	boxReq, openReq, err := a.requests(o, argv)
	if err != nil {
		return 0, err
	}
	if o.tty && !o.detach {
		if openReq.PTY, err = a.terminalSize(); err != nil {
			return 0, err
		}
	}
	cl, err := a.connect(tenantKey)
	if err != nil {
		return 0, err
	}
	defer cl.CloseIdle()
	// Signals are caught before anything is made, so that Ctrl-C at any moment
	// leaves nothing behind.
	sigs := catchSignals(openReq.PTY != nil)
	defer sigs.stop()
	begin, release := sigs.cancelling(ctx)
	defer release()

	done := a.progress("preparing the box")
	box, err := cl.AcquireBox(begin, boxReq)
	done()
	if err != nil {
		return 0, interrupted(begin, err)
	}
	keep := o.box != "" || o.keep || o.detach
	defer func() {
		if !keep {
			a.removeBox(ctx, cl, box.ID)
		}
	}()
	run, err := cl.CreateRun(begin, api.RunRequest{Box: box.ID, Models: o.models, AutoFinish: true})
	if err != nil {
		return 0, interrupted(begin, err)
	}
	runner := cl.WithKey(run.Token)
	done = a.progress("starting")
	proc, err := runner.Open(begin, openReq)
	done()
	if err != nil {
		// Whether it started or not: finishing the run closes what there is.
		a.finish(ctx, cl, run.Run.ID, "it could not be opened")
		return 0, interrupted(begin, err)
	}
	release()
	if o.detach {
		if a.json {
			return 0, a.printJSON(proc.Info())
		}
		_, err := fmt.Fprintln(a.Stdout, proc.Handle())
		return 0, err
	}
	// From here on the workspace key is used: it outlives the run's token.
	end, err := a.session(ctx, cl.Process(proc.Handle()), sigs, sessionOptions{stdin: openReq.Stdin || openReq.PTY != nil, tty: openReq.PTY != nil, grace: o.grace})
	switch {
	case errors.Is(err, errDetached):
		keep = true
		a.say("\ndetached; %s goes on. Come back with: stockade attach %s", proc.Handle(), proc.Handle())
		return 0, nil
	case errors.Is(err, errOutput):
		// Nobody sees what it says, or would know that it still runs.
		a.finish(ctx, cl, run.Run.ID, "its output could not be written")
		return 0, err
	case err != nil:
		keep = true // it may go on, in its box
		return 0, err
	}
	a.finish(ctx, cl, run.Run.ID, "the command ended")
	return a.verdict(end), nil
}

// checkGrace bounds --grace as the server does.
func checkGrace(d time.Duration) error {
	if d < 0 || d > 10*time.Minute {
		return errdefs.New(errdefs.Invalid, "--grace is %v, it may be 0s to 10m", d)
	}
	return nil
}

// interrupted makes of an error that Ctrl-C caused one that says so.
func interrupted(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "interrupted before the command had started")
	}
	return err
}

// verdict says what the exit status alone does not, and returns it.
func (a *app) verdict(e api.Exit) int {
	switch e.Kind {
	case api.ExitExited:
	case api.ExitSpawnFailed:
		a.say("stockade: the command %s", outcome(e))
	case api.ExitUnknown:
		a.say("stockade: how the command ended is %s", outcome(e))
	default:
		a.say("stockade: the command was %s", outcome(e))
	}
	return childExit(&e)
}

func (a *app) requests(o runOptions, argv []string) (api.BoxRequest, api.OpenRequest, error) {
	box := api.BoxRequest{Key: o.box, Image: o.image}
	open := api.OpenRequest{RequestID: o.requestID, Argv: argv, Cwd: o.workdir, Stdin: !o.noStdin && !o.detach && !o.tty, Env: map[string]string{}}
	if open.RequestID == "" {
		open.RequestID = "cli-" + rand.Text()
	}
	for _, e := range o.env {
		name, value, ok := strings.Cut(e, "=")
		if !ok {
			value, ok = os.LookupEnv(name)
			if !ok {
				continue // as docker run does
			}
		}
		open.Env[name] = value
	}
	if rel, err := filepath.Rel("/workspace", o.workdir); err == nil && filepath.IsLocal(rel) {
		open.Cwd = rel // as box cp and the prompt in the box name it
	}
	if o.rm && (o.box != "" || o.keep || o.detach) {
		return box, open, errdefs.New(errdefs.Invalid, "--rm is for a new box that ends with the command").WithNext("leave out --rm, or --box, --keep and --detach; stockade box rm removes a box")
	}
	var err error
	if box.Limits.MemoryBytes, err = parseSize("--memory", o.memory); err != nil {
		return box, open, err
	}
	if open.Limits.SpoolBytes, err = parseSize("--spool", o.spool); err != nil {
		return box, open, err
	}
	box.Limits.CPUMillis, box.Limits.Pids = int64(o.cpus*1000), o.pids
	open.Limits.DeadlineMillis = o.deadline.Milliseconds()
	// What is not a thousandth would be 0 here, and so mean the default.
	switch {
	case o.cpus != 0 && !(o.cpus >= 0.001 && o.cpus <= 1<<20):
		return box, open, errdefs.New(errdefs.Invalid, "--cpus is %v, which is no number of processors", o.cpus).WithNext("write one like 0.5 or 2")
	case o.pids < 0:
		return box, open, errdefs.New(errdefs.Invalid, "--pids is %d, which is no number of processes", o.pids)
	case o.deadline != 0 && o.deadline < time.Millisecond:
		return box, open, errdefs.New(errdefs.Invalid, "--deadline is %v, it must be at least 1ms", o.deadline)
	}
	if err := checkGrace(o.grace); err != nil {
		return box, open, err
	}
	open.Limits.Overflow = api.Overflow(o.overflow)
	if o.overflow == "" && o.detach {
		// Nobody may ever read a detached command's log; it must not stop for that.
		open.Limits.Overflow = api.OverflowDropOldest
	}
	for _, v := range o.volumes {
		m, err := parseVolume(v)
		if err != nil {
			return box, open, err
		}
		box.Mounts = append(box.Mounts, m)
	}
	for _, v := range o.mounts {
		m, err := parseMount(v)
		if err != nil {
			return box, open, err
		}
		box.Mounts = append(box.Mounts, m)
	}
	return box, open, nil
}

// finish ends a run that is over; what goes wrong is told, the command's own end stands.
func (a *app) finish(ctx context.Context, cl *client.Client, run, reason string) {
	ctx, cancel := bounded(ctx, 30*time.Second)
	defer cancel()
	if _, err := cl.FinishRun(ctx, run, api.FinishRequest{Reason: reason}); err != nil {
		a.say("stockade: the run %s could not be finished and will expire: %v", run, err)
	}
}

func (a *app) removeBox(ctx context.Context, cl *client.Client, id string) {
	ctx, cancel := bounded(ctx, 30*time.Second)
	defer cancel()
	if err := cl.RemoveBox(ctx, id); err != nil {
		a.say("stockade: the box %s could not be removed and stays until it is idle: %v", id, err)
	}
}

func (a *app) attachCommand() *cobra.Command {
	var cursor string
	var noStdin bool
	var grace time.Duration
	c := &cobra.Command{
		Use: "attach PROCESS", Short: "Attach to a running process",
		Long: `Attaches to a process as if it had been started here: its output from --since-cursor on (default:
from now on), its input, its exit status. Ctrl-C stops the process as in run; on a terminal
Ctrl-P Ctrl-Q leaves it running.`,
		Example: "  stockade attach proc_4x…",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.connect(tenantKey)
			if err != nil {
				return err
			}
			proc, err := a.process(cmd.Context(), cl, args[0])
			if err != nil {
				return err
			}
			p, err := proc.Get(cmd.Context())
			if err != nil {
				return err
			}
			if err := checkGrace(grace); err != nil {
				return err
			}
			if cursor == "" {
				cursor = p.Cursor
			}
			_, tty := terminal(a.Stdin)
			o := sessionOptions{cursor: cursor, stdin: !noStdin && !p.Stdin.EOF && p.Exit == nil, offset: p.Stdin.Accepted, tty: p.PTY && tty, grace: grace}
			sigs := catchSignals(o.tty)
			defer sigs.stop()
			end, err := a.session(cmd.Context(), proc, sigs, o)
			if errors.Is(err, errDetached) {
				a.say("\ndetached")
				return nil
			}
			if err != nil {
				return err
			}
			if code := a.verdict(end); code != 0 {
				return exitError{code}
			}
			return nil
		},
	}
	c.Flags().StringVar(&cursor, "since-cursor", "", "cursor to show output from")
	c.Flags().BoolVar(&noStdin, "no-stdin", false, "do not forward input")
	c.Flags().DurationVar(&grace, "grace", 5*time.Second, "time between SIGTERM and SIGKILL on Ctrl-C")
	return c
}

func (a *app) closeCommand() *cobra.Command {
	var grace time.Duration
	var kill bool
	var reason string
	c := &cobra.Command{
		Use: "close PROCESS…", Short: "Stop processes and show the proof",
		Long: `Stops a process with everything it started: SIGTERM, after --grace SIGKILL, then waits until
the kernel says that the whole tree is gone. Prints the receipt. When that cannot be proven
a fence stands and the exit status is 18.`,
		Example: "  stockade close proc_4x…\n  stockade close --kill 4xkq",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.connect(tenantKey)
			if err != nil {
				return err
			}
			if kill {
				grace = 0
			}
			if err := checkGrace(grace); err != nil {
				return err
			}
			ms := grace.Milliseconds()
			status := 0
			for _, arg := range args {
				proc, err := a.process(cmd.Context(), cl, arg)
				if err != nil {
					return err
				}
				done := a.progress("stopping " + proc.Handle())
				res, err := proc.Close(cmd.Context(), api.CloseRequest{Reason: reason, GraceMillis: &ms})
				done()
				if err != nil {
					return err
				}
				if !res.Quiescent {
					status = ExitCodes[errdefs.Indeterminate]
				}
				if a.json {
					err = a.printLine(res)
				} else {
					err = a.showClosed(res)
				}
				if err != nil {
					return err
				}
			}
			if status != 0 {
				return exitError{status}
			}
			return nil
		},
	}
	c.Flags().DurationVar(&grace, "grace", 5*time.Second, "time between SIGTERM and SIGKILL")
	c.Flags().BoolVar(&kill, "kill", false, "kill at once")
	c.Flags().StringVar(&reason, "reason", "closed by hand", "why; it is recorded")
	return c
}

func (a *app) showClosed(res api.CloseResponse) error {
	if !res.Quiescent {
		a.say("%s: NOT PROVEN GONE", res.Process.Handle)
		if res.Fence != nil {
			return a.showFence(*res.Fence)
		}
		return nil
	}
	rows := [][]string{{"process", res.Process.Handle}, {"status", status(res.Process)}}
	if r := res.Receipt; r != nil {
		rows = append(rows, []string{"receipt", r.ID}, []string{"gone at", r.EmptyAt.Local().Format(time.RFC3339Nano)},
			[]string{"proof", strings.ReplaceAll(r.Method, "_", " ")}, []string{"boot", r.BootID})
	}
	return a.pairs(rows)
}

func (a *app) logsCommand() *cobra.Command {
	var follow, printCursor, ack bool
	var cursor, stream string
	c := &cobra.Command{
		Use: "logs PROCESS", Short: "Show the output of a process",
		Long: `Shows the kept output of a process, standard output and standard error apart. Reading consumes
nothing. Output that is no longer kept is told as an exact gap. With --json it prints one
record per line, with base-64 data.`,
		Example: "  stockade logs -f 4xkq\n  stockade logs --since-cursor abcdef.4096 4xkq",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if stream != "" && stream != client.Stdout && stream != client.Stderr {
				return errdefs.New(errdefs.Invalid, "--stream is %q, it must be stdout or stderr", stream)
			}
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			cl, err := a.connect(tenantKey)
			if err != nil {
				return err
			}
			proc, err := a.process(ctx, cl, args[0])
			if err != nil {
				return err
			}
			out := proc.Output(ctx, client.OutputOptions{Cursor: cursor, NoFollow: !follow, Ack: ack})
			defer out.Close()
			for {
				chunk, err := out.Next()
				if errors.Is(err, io.EOF) || err != nil && ctx.Err() != nil {
					break
				}
				if err != nil {
					return err
				}
				if err := a.showChunk(chunk, stream); err != nil {
					return err
				}
			}
			if printCursor {
				a.say("%s", out.Cursor())
			}
			return nil
		},
	}
	f := c.Flags()
	f.BoolVarP(&follow, "follow", "f", false, "go on until the process ends")
	f.StringVar(&cursor, "since-cursor", "", "cursor to begin at")
	f.StringVar(&stream, "stream", "", "only stdout, or only stderr")
	f.BoolVar(&printCursor, "print-cursor", false, "print the cursor to go on from to standard error at the end")
	f.BoolVar(&ack, "ack", false, "let the log drop what was shown here when it is full")
	return c
}

func (a *app) showChunk(c client.Chunk, only string) error {
	if c.Gap != nil {
		if a.json {
			return a.printLine(map[string]any{"gap": c.Gap})
		}
		a.say("stockade: %d bytes from cursor %s to %s are no longer kept", c.Gap.Bytes, c.Gap.From, c.Gap.To)
		return nil
	}
	if only != "" && c.Stream != only {
		return nil
	}
	if a.json {
		return a.printLine(api.Record{Stream: c.Stream, Offset: c.Offset, Cursor: c.Cursor, Data: c.Data})
	}
	w := a.Stdout
	if c.Stream == client.Stderr {
		w = a.Stderr
	}
	_, err := w.Write(c.Data)
	return err
}
