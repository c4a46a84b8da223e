"""Word lists the generated conversations draw from; no logic."""

NAMES = """Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olga Paul Quinn Rosa Sam Tom
Una Victor Wendy Xavier Yara Zoe Alice Bruno Celia Dora Edgar Flora George Helen Ivan Julia Karl Laura Martin Nina
Oscar Petra Ralph Sofia Theo Ursula Vera Walter Adam Beth Carl Diana Eric Fiona Gina Hugo Irma James Kim Louis
Mona Nora Owen Peter Rita Simon Tara Viola Will Agnes Boris Cora Derek Elsa Frank Greta Hans Ida Jonas""".split()

SURNAMES = """Hill Brook Stone Field Wood Lake Marsh Ford Lane Ward Hart Reed Cole Dale Frost Grant Hale King Long
Moss Nash Park Pike Rowe Shaw Snow Swan Vale West York""".split()

NOUNS = """lamp box chair table door window garden bottle basket bridge candle carpet clock cup curtain drum engine
feather fence flag flute glass glove hammer hat kettle key kite knife ladder letter map mirror needle oven paper
pencil piano plate pillow pot purse ring rope ruler saddle scarf shelf ship shoe soap spoon stove sword tent ticket
tower towel train tray trumpet violin wagon wheel whistle wire anchor apron arrow barrel bell bench blanket book boot
bowl brush bucket button cable camera coat coin comb crown desk dish fan fork frame guitar helmet hook jar jug lock
log mask nail net pan pipe plank pump rack rake rug sack sail saw screw sheet sled stool strap string tile tool
torch toy tube vase wallet watch whip zipper""".split()

ADJECTIVES = """red blue green yellow white black brown grey old new big small heavy light round square long short
broken clean wooden golden silver plain bright dark soft hard warm cold dry wet thin thick empty full quiet loud
cheap fine rough smooth sharp strong""".split()

COLOURS = "red blue green yellow white black brown grey orange purple pink violet golden silver".split()

ANIMALS = """fox bear owl cat dog mouse rabbit wolf horse goat duck frog deer hen lamb crow badger otter whale
turtle donkey squirrel swan hedgehog lion tiger sparrow bee snail pony""".split()

CITIES = """Oslo Paris Rome Berlin Madrid Lisbon Vienna Prague Athens Cairo Lima Quito Tokyo Kyoto Seoul Delhi
Mumbai Sydney Perth Boston Chicago Denver Dallas Austin Seattle Toronto Montreal Havana Bogota Santiago Dublin London
Leeds York Glasgow Geneva Zurich Milan Naples Turin Venice Porto Seville Hamburg Munich Dresden Warsaw Krakow Riga
Vilnius Tallinn Helsinki Stockholm Bergen Malmo Copenhagen Brussels Ghent Bruges Utrecht Delft Lyon Nice Nantes
Bordeaux Tunis Dakar Accra Lagos Nairobi Kigali Harare Durban Manila Hanoi Jakarta Osaka Nagoya""".split()

CAPITALS = dict(
    pair.split(":")
    for pair in """France:Paris Italy:Rome Germany:Berlin Spain:Madrid Portugal:Lisbon Austria:Vienna Greece:Athens
Egypt:Cairo Peru:Lima Japan:Tokyo Norway:Oslo Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Poland:Warsaw
Ireland:Dublin England:London Belgium:Brussels Hungary:Budapest Canada:Ottawa Cuba:Havana Russia:Moscow China:Beijing
India:Delhi Kenya:Nairobi Chile:Santiago Switzerland:Bern Scotland:Edinburgh Wales:Cardiff Turkey:Ankara""".split()
)

SKIES = "sunny cloudy rainy windy foggy stormy snowy clear".split()
UNITS = "miles metres feet inches pounds grams litres gallons hours minutes".split()
CURRENCIES = "euro dollars pounds francs yen crowns".split()
FOLDERS = "notes docs data work home music photos plans tests old draft letters games recipes lists".split()
ENDINGS = "txt md csv log json html cfg dat".split()
VERBS = """paint open close move count weigh clean mark pack print send sort store wash build cut fold lift load lock
name pull push read roll scan sell ship stack start stop test trace turn wrap write""".split()
FIELDS = """size weight colour owner label status code level price count place grade height width age rank order
mode speed title""".split()
ATTRIBUTES = """code number colour town age room key word desk seat score password phone street pet drink locker
badge""".split()

HEROES = """king queen girl boy farmer witch robot dragon princess prince wizard sailor baker giant knight soldier
teacher captain fisherman ghost monster cowboy doctor painter""".split()
SMALL_NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty""".split()
