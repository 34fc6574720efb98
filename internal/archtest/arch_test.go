package archtest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/stockade-run/stockade"

var update = flag.Bool("update", false, "rewrite the drawing in ARCHITECTURE.md")

type pkg struct {
	Dir, ImportPath, Doc                              string
	GoFiles, Imports, TestGoFiles, XTestGoFiles, Deps []string
	TestImports, XTestImports                         []string
}

func list(t *testing.T, args ...string) []pkg {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json"}, args...)...)
	cmd.Dir = root(t)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var pkgs []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); err == io.EOF {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}

func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func rooms() (floor map[string]int, room map[string]Room) {
	floor, room = map[string]int{}, map[string]Room{}
	for i, f := range Floors {
		for _, r := range f.Rooms {
			floor[r.Path], room[r.Path] = i, r
		}
	}
	return floor, room
}

func TestRanks(t *testing.T) {
	floor, room := rooms()
	seen := map[string]bool{}
	for _, p := range list(t, "./...") {
		path := strings.TrimPrefix(p.ImportPath, module+"/")
		seen[path] = true
		at, ok := floor[path]
		if !ok {
			t.Errorf("%s stands on no floor: give it a place in table.go", path)
			continue
		}
		for _, imp := range p.Imports {
			to, ours := strings.CutPrefix(imp, module+"/")
			if !ours {
				if room[path].Pure && slices.Contains(pureDenied, imp) {
					t.Errorf("%s is pure and imports %s", path, imp)
				}
				continue
			}
			if floor[to] >= at {
				t.Errorf("%s (%s) imports %s (%s): a package imports only lower floors",
					path, Floors[at].Name, to, Floors[floor[to]].Name)
			}
			if slices.Contains(testRooms, to) && !slices.Contains(testRooms, path) {
				t.Errorf("%s imports %s outside its tests", path, to)
			}
			if room[path].Pure && !room[to].Pure {
				t.Errorf("%s is pure and imports %s, which is not", path, to)
			}
		}
	}
	for path := range floor {
		if !seen[path] {
			t.Errorf("%s is in the table and not in the tree", path)
		}
	}
}

func TestPureRooms(t *testing.T) {
	_, room := rooms()
	for _, p := range list(t, "./...") {
		if !room[strings.TrimPrefix(p.ImportPath, module+"/")].Pure {
			continue
		}
		for _, name := range p.GoFiles {
			fset := token.NewFileSet()
			file, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(file, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.GoStmt, *ast.SelectStmt, *ast.SendStmt:
					t.Errorf("%s: a pure room holds a goroutine, select or channel send", fset.Position(n.Pos()))
				case *ast.SelectorExpr:
					if x, ok := n.X.(*ast.Ident); ok && slices.Contains(pureCalls[x.Name], n.Sel.Name) {
						t.Errorf("%s: a pure room calls %s.%s; take now as an argument", fset.Position(n.Pos()), x.Name, n.Sel.Name)
					}
				}
				return true
			})
		}
	}
}

func TestHostLinksOnlyItsOwn(t *testing.T) {
	for _, p := range list(t, "./cmd/stockade-host") {
		for _, dep := range p.Deps {
			if why, ok := hostDenied[strings.TrimPrefix(dep, module+"/")]; ok {
				t.Errorf("stockade-host links %s: %s", dep, why)
			}
		}
	}
}

func TestTestCodeStaysOut(t *testing.T) {
	for _, p := range list(t, "./cmd/stockade", "./cmd/stockade-host") {
		for _, dep := range p.Deps {
			if dep == "testing" || strings.HasPrefix(dep, "go.uber.org/goleak") || strings.HasPrefix(dep, "pgregory.net/rapid") {
				t.Errorf("%s links %s", p.ImportPath, dep)
			}
		}
	}
}

// TestHouse holds one package comment per package, no init functions, and the
// limit of a file's length.
func TestHouse(t *testing.T) {
	for _, p := range list(t, "./...") {
		comments := 0
		for _, name := range append(append(slices.Clone(p.GoFiles), p.TestGoFiles...), p.XTestGoFiles...) {
			path := filepath.Join(p.Dir, name)
			fset := token.NewFileSet()
			file, err := parser.ParseFile(fset, path, nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if n := fset.File(file.Pos()).LineCount(); n > 1000 {
				t.Errorf("%s has %d lines, the limit is 1,000", path, n)
			}
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			if file.Doc != nil {
				comments++
			}
			for _, d := range file.Decls {
				if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.Name == "init" {
					t.Errorf("%s: init functions hide wiring", fset.Position(f.Pos()))
				}
			}
		}
		if comments != 1 && len(p.GoFiles) > 0 {
			t.Errorf("%s has %d package comments, it needs one", p.ImportPath, comments)
		}
	}
}

// TestExportedIsDocumented: everything exported outside tests says what it promises.
func TestExportedIsDocumented(t *testing.T) {
	for _, p := range list(t, "./...") {
		for _, name := range p.GoFiles {
			fset := token.NewFileSet()
			file, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range file.Decls {
				switch d := d.(type) {
				case *ast.FuncDecl:
					if d.Name.IsExported() && d.Doc == nil && exportedReceiver(d) {
						t.Errorf("%s: %s has no comment", fset.Position(d.Pos()), d.Name.Name)
					}
				case *ast.GenDecl:
					for _, s := range d.Specs {
						if ts, ok := s.(*ast.TypeSpec); ok && ts.Name.IsExported() && d.Doc == nil && ts.Doc == nil && ts.Comment == nil {
							t.Errorf("%s: type %s has no comment", fset.Position(ts.Pos()), ts.Name.Name)
						}
					}
				}
			}
		}
	}
}

func exportedReceiver(d *ast.FuncDecl) bool {
	if d.Recv == nil {
		return true
	}
	typ := d.Recv.List[0].Type
	if star, ok := typ.(*ast.StarExpr); ok {
		typ = star.X
	}
	if ix, ok := typ.(*ast.IndexExpr); ok {
		typ = ix.X
	}
	id, ok := typ.(*ast.Ident)
	return ok && id.IsExported()
}

const begin, end = "<!-- drawing: made by go test ./internal/archtest -update -->\n", "<!-- end of drawing -->\n"

func TestDrawingIsCurrent(t *testing.T) {
	path := filepath.Join(root(t), "ARCHITECTURE.md")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(text), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("ARCHITECTURE.md has no place for the drawing: it needs the lines %q and %q", begin, end)
	}
	want := head + begin + drawing() + end + tail
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if want != string(text) {
		t.Error("the drawing in ARCHITECTURE.md is not the one of table.go: run go test ./internal/archtest -update")
	}
}

func drawing() string {
	var b strings.Builder
	b.WriteString("```\n")
	for i := len(Floors) - 1; i >= 0; i-- {
		fmt.Fprintf(&b, "%2d %s\n", i, Floors[i].Name)
		for _, r := range Floors[i].Rooms {
			pure := " "
			if r.Pure {
				pure = "P"
			}
			fmt.Fprintf(&b, "   %s %-28s %s\n", pure, strings.TrimPrefix(r.Path, "internal/"), r.Does)
		}
	}
	b.WriteString("```\n")
	return b.String()
}

// TestNoMachineText keeps what belongs to one machine out of the repository.
func TestNoMachineText(t *testing.T) {
	cmd := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	cmd.Dir = root(t)
	out, err := cmd.Output()
	if err != nil {
		t.Skipf("not a git checkout: %v", err)
	}
	home := "/" + "work/"
	for name := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
		f, err := os.Open(filepath.Join(root(t), name))
		if err != nil {
			continue // deleted in the work tree
		}
		sc := bufio.NewScanner(f)
		sc.Buffer(nil, 1<<22)
		for n := 1; sc.Scan(); n++ {
			for _, w := range []string{" " + home, "\"" + home, "=" + home, "(" + home} {
				if strings.Contains(" "+sc.Text(), w) {
					t.Errorf("%s:%s holds a machine path", name, strconv.Itoa(n))
				}
			}
		}
		f.Close()
	}
}
