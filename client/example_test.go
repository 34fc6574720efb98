package client_test

import (
	"context"
	"fmt"
	"net/http/httptest"
	"os"
	"strings"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/httpapi"
)

// exampleServer stands for a running server; programs use its address and the
// key that the operator gave them.
func exampleServer() (url string, stop func()) {
	w := newWorld()
	h, err := httpapi.New(httpapi.Config{Broker: w, Boxes: boxes{}, Tenants: tenants{}, Stream: w.stream})
	if err != nil {
		panic(err)
	}
	srv := httptest.NewServer(h)
	return srv.URL, srv.Close
}

// Run a command in a box and print what it says.
func Example() {
	url, stop := exampleServer()
	defer stop()
	ctx := context.Background()

	tenant, err := client.New(client.Config{URL: url, Key: "workspace"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer tenant.CloseIdle()
	box, err := tenant.AcquireBox(ctx, client.BoxRequest{Key: "my-project"})
	if err != nil {
		fmt.Println(err)
		return
	}
	run, err := tenant.CreateRun(ctx, client.RunRequest{Box: box.ID})
	if err != nil {
		fmt.Println(err)
		return
	}
	// Processes belong to the run: its token opens them.
	c := tenant.WithKey(run.Token)
	p, err := c.Open(ctx, client.OpenRequest{RequestID: "greeting-1", Argv: []string{"echo", "hello from the box"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	if _, err := p.Copy(ctx, os.Stdout, os.Stderr, client.OutputOptions{}); err != nil {
		fmt.Println(err)
		return
	}
	exit, err := p.Wait(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(exit.Kind, *exit.Code)
	// Output:
	// hello from the box
	// exited 0
}

// Write the input of a process.
func ExampleProcess_Stdin() {
	url, stop := exampleServer()
	defer stop()
	ctx := context.Background()
	c, _ := client.New(client.Config{URL: url, Key: "run"})
	defer c.CloseIdle()

	p, err := c.Open(ctx, client.OpenRequest{RequestID: "sum-1", Argv: []string{"sha256sum"}, Stdin: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	stdin := p.Stdin(ctx)
	fmt.Fprint(stdin, strings.Repeat("x", 1000))
	stdin.Close()
	fmt.Println(stdin.Offset(), "bytes were accepted")
	// Output: 1000 bytes were accepted
}

// Read output piece by piece, from a cursor kept from before.
func ExampleProcess_Output() {
	url, stop := exampleServer()
	defer stop()
	ctx := context.Background()
	c, _ := client.New(client.Config{URL: url, Key: "run"})
	defer c.CloseIdle()

	p, err := c.Open(ctx, client.OpenRequest{RequestID: "r1", Argv: []string{"echo", "one two"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	for chunk, err := range p.Output(ctx, client.OutputOptions{}).All() {
		switch {
		case err != nil:
			fmt.Println(err)
		case chunk.Gap != nil:
			fmt.Println(chunk.Gap.Bytes, "bytes are no longer kept")
		default:
			fmt.Printf("%s at %d: %q\n", chunk.Stream, chunk.Offset, chunk.Data)
		}
	}
	// Output: stdout at 0: "one two\n"
}

// Errors carry a stable code.
func ExampleCodeOf() {
	url, stop := exampleServer()
	defer stop()
	c, _ := client.New(client.Config{URL: url, Key: "run"})
	defer c.CloseIdle()

	_, err := c.Process("proc_nothing").Get(context.Background())
	fmt.Println(client.CodeOf(err))
	// Output: not_found
}
